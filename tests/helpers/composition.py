"""The composition matrix: the settings that change how a step is computed or where its state lies, as data.

``AXES`` has a line for each axis: its values, and what each adds to the config. ``covering`` picks combinations so that
every two (or three) values of different axes occur together in one of them. ``REFUSALS`` are the values that the engine
refuses together, with the error's code; they occur in no combination and are asserted one by one.

To add an axis, add a line to ``AXES``. What the config cannot say, the test does itself: the key ``run`` has fields of
``Run``.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Values = dict[str, dict[str, Any]]
Combination = dict[str, str]  # by axis


def _switch(**sections: Any) -> Values:
    return {"no": {}, "yes": sections}


def _zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def _run(**fields: Any) -> dict[str, Any]:
    return {"run": fields}


def _tp(size: int = 2, **keys: Any) -> dict[str, Any]:
    return {"parallel": {"tp": size, "tp_plan": _PLAN, **keys}, **_run(tp=size)}


def _experts(ep: int, **keys: Any) -> dict[str, Any]:
    plan = {"blocks.*.router": "replicate"}
    return {"parallel": {"ep": ep, "tp_plan": plan}, "expert_parallel": keys, **_run(experts=4)}


def _optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 0.1, "weight_decay": 0.1, **params}}}


# Adam divides by the root of the gradient's own square. With an eps as large as gradients are, rounding errors of tiny
# ones stay tiny in the update, and a wrong factor of a gradient is seen: 1.25 changes a parameter by 30 to 100 times
# what rounding to fp16 does; with 1e-3 (and a rate of 0.01) it was 1 to 4 times.
_EPS = 0.1

_PLAN = {
    "embedding": "vocab",
    **dict.fromkeys(("blocks.*.q_proj", "blocks.*.k_proj", "blocks.*.v_proj", "blocks.*.up"), "column"),
    **dict.fromkeys(("blocks.*.o_proj", "blocks.*.down"), "row"),
    "head": "vocab_head",
}

AXES: dict[str, Values] = {
    # layout
    "stage": {str(stage): _zero(stage=stage) for stage in range(4)},
    "ranks": {str(number): _run(ranks=number) for number in (1, 2, 4)},  # data-parallel ones
    # "split": activations between the layers along the sequence, logits along the vocabulary.
    "tp": {"1": {}, "2": _tp(), "2 split": _tp(tp_sequence_parallel=True, tp_loss_parallel=True)},
    "sp": {"1": {}, "2": {"parallel": {"sp": 2}, **_run(sp=2)}},
    "cp": {"1": {}, "2": {"parallel": {"cp": 2}, **_run(cp=2)}},
    "pp": {"1": {}, "2": {"parallel": {"pp": 2}, **_run(pp=2)}},
    "schedule": {
        "1f1b": {},
        "gpipe": {"pipeline": {"schedule": "gpipe"}},
        "zb_h1": {"pipeline": {"schedule": "zb_h1"}},
        "zbv": {"pipeline": {"schedule": "zbv", "virtual_stages": 2}, **_run(blocks=4)},
    },
    # A layer of experts beside the feed-forward layer of each block, over so many expert-parallel ranks. "split": each
    # expert over the tensor-parallel ranks too.
    "experts": {
        "no": {},
        "ep 1": _experts(1),
        "ep 2": _experts(2),
        "ep 4": _experts(4),
        "ep 2 split": _experts(2, expert_tensor_parallel_size=2),
        "ep 2 moved": _experts(2, rebalance_every=1),
        "ep 2 overlap": _experts(2, overlap=2),
    },
    "hybrid": {
        "no": {},
        "mics": _zero(mics_shard_size=2),
        "replicas": {"parallel": {"dp_replicate": 2}},
        # Replicas that take each step by themselves and are then set to their mean: with SGD the step of all.
        "local steps": {
            "parallel": {"dp_replicate": 2},
            "local_steps": {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
        },
        "hpz": _zero(zero_hpz_partition_size=2),
    },
    "units": {"blocks": {"units": {"classes": ["Block"]}}, "found": {}, "root": {"units": {"names": ["blocks"]}}},
    "small": _switch(**_zero(stage3_param_persistence_threshold=40, stage3_model_persistence_threshold=100)),
    # where state lies
    "state": {
        "device": {},
        "host": _zero(offload_optimizer={"device": "cpu"}),
        "ahead": _zero(offload_optimizer={"device": "cpu", "super_offload": True}),
        "ratio": _zero(offload_optimizer={"device": "cpu", "ratio": 0.5}),
        "disk": _zero(offload_optimizer={"device": "nvme"}),
        # Where every gradient is applied in its step, the numbers are those of plain AdamW, whatever is important.
        "zenflow": _zero(
            offload_optimizer={"device": "cpu"},
            zenflow={"topk_ratio": 0.5, "update_interval": 1, "select_strategy": "step", "select_interval": 2},
        ),
    },
    "parameters": {
        "device": {},
        "host": _zero(offload_param={"device": "cpu"}),
        "disk": _zero(offload_param={"device": "nvme", "max_in_cpu": 0}),
    },
    "host memory": {"the device's": {}, "apart": _run(is_host_separate=True)},
    "recompute": {
        "no": {},
        "blocks": {"activation_checkpointing": {"modules": ["Block"]}},
        "host": {"activation_checkpointing": {"modules": ["Block"], "cpu_checkpointing": True}},
        "offload": {"offload_activation": {"device": "cpu"}},
        "matmul": {"activation_checkpointing": {"modules": ["Block"], "policy": "matmul"}},
    },
    # how a step is computed. Sums over ranks have another order than on one process. In 16 bits that may change the
    # last bit of a parameter and so the next gradient: the bounds are some last bits (2**-8 in bf16, 2**-11 in fp16),
    # for activations that are split are rounded on each rank.
    "precision": {
        "fp32": _run(bound=1e-6, steps=5),
        "bf16": {"bf16": {"enabled": True}, **_run(dtype="bfloat16", bound=2**-7)},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 7}, **_run(dtype="float16", scale=128, bound=2**-10)},
        "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, **_run(autocast=True, bound=2**-7)},
        "bf16 alone": {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
            **_run(dtype="bfloat16", has_main=False, bound=2**-5),
        },
    },
    "accumulation": {str(number): {"gradient_accumulation_steps": number} for number in (1, 2)},
    "loss": {"mean": {}, "token": {"loss_reduction": "token", **_run(is_ragged=True)}},
    # "varying": the micro-batches of a step have different numbers of rows, the same on all ranks.
    "rows": {"2": {}, "varying": _run(is_varying=True)},
    "clipping": _switch(gradient_clipping=0.05),
    "optimizer": {
        "AdamW": _optimizer("AdamW", eps=_EPS),
        "momentum": _optimizer("SGD", momentum=0.9),
        "client": {**_optimizer("AdamW", eps=_EPS), **_run(is_client=True)},
        "1 bit": _optimizer("OneBitAdam", eps=_EPS, freeze_step=2),  # as int8, a format that loses nothing
    },
    # In the runs int8 is a format that loses nothing: the way that encoded values take is that of any format.
    "wire": {
        "no": {},
        "yes": {"wire": {"gather": "int8", "reduce": "int8", "error_feedback": True}},
        "difference": {"wire": {"gather": "int8", "difference": True}},
        "activations": {"wire": dict.fromkeys(("experts", "pipeline", "tensor", "sequence"), "int8")},
    },
    # In the runs the recipe rounds nothing: the way that products take is that of any recipe.
    "fp8": _switch(fp8={"recipe": "rowwise", "modules": ["*"]}),
    # In the runs each element is a block: what is stored is another form, whose values lose the last bit.
    "stored state": {"fp32": {}, "int8": {"precision": {"state_dtype": "int8"}}},
    # With narrow buckets the ranks also compare what they hold alike.
    "buckets": {"wide": {}, "narrow": _zero(reduce_bucket_size=40) | {"debug": {"replica_check_steps": 1}}},
    "gathering": {
        "ahead": {},
        "late": _zero(stage3_prefetch_bucket_size=0, stage3_max_live_parameters=100),
        "kept": _zero(stage3_max_reuse_distance=1_000_000_000),
    },
    "overlap": _switch(**_zero(overlap_param_gather=True)),  # gathers after the step, with the next forward
    "compile": _switch(**_run(compiled="blocks")),  # each block; the whole model: tests/ranks/engine/test_compiled.py
    "backward": {"engine": {}, "loss": _run(style="loss"), "no_sync": _run(style="no_sync")},
    "thread": {"of the caller": {}, "other": _run(is_backward_apart=True)},  # where backward runs: on GPUs another one
    "between": {
        "nothing": {},
        "evaluation": _run(between="evaluate"),
        "offload_states": _run(between="offload_states"),
        "resume": _run(between="resume"),
        "resume async": {"checkpoint": {"async_save": True}, **_run(between="resume")},
    },
    # the model
    "built": {"plainly": {}, "zero.Init": _run(is_early=True)},
    "passed in": {"fp32": {}, "the compute dtype": _run(is_cast=True)},
    "head": {"tied": {}, "own": _run(is_tied=False)},
    "heads": {"7": _run(heads=7), "6 and 3": _run(heads=6, kv_heads=3)},
    # "rotary": tables of a buffer, which all blocks take, in the dtype of what the embedding returns.
    "positions": {"learned": {}, "rotary": _run(is_rotary=True)},
    # Packed documents of other lengths in each row, given to each stage with the micro-batch: masked, and positions
    # counted from 0 in each. "ids": as a tensor of this rank's positions.
    "documents": {"one": {}, "packed": _run(documents="packed"), "ids": _run(documents="ids")},
    # "transposed": activations and their gradients, before and after each layer, and one of a block's weights are
    # stored in another order.
    "layout": {"dense": {}, "transposed": _run(is_transposed=True)},
    "sharing": {"no": {}, **{kind: _run(sharing=kind) for kind in ("weight", "module", "twice")}},
    "spare": {
        "no": {},
        "unused": {"parallel": {"tp_plan": {"spare": "replicate"}}, **_run(spare="unused")},
        "frozen": _run(spare="frozen"),
    },
}

# What failed in use were combinations of three: any three of these values have rows of their own in tests/nightly.
_OF_TRIPLES: dict[str, tuple[str, ...]] = {
    "stage": ("0", "1", "2", "3"),
    "ranks": ("1", "2"),
    "tp": ("1", "2", "2 split"),
    "sp": ("1", "2"),
    "cp": ("1", "2"),
    "pp": ("1", "2"),
    "schedule": ("1f1b", "zbv"),
    "experts": ("no", "ep 2"),
    "hybrid": ("no", "replicas"),
    "precision": ("fp32", "bf16", "fp16"),
    "recompute": ("no", "blocks", "offload", "matmul"),
    "accumulation": ("2",),
}


def triples_of_sums() -> list[Combination]:
    """Combinations of any three values of stage, schedule, the axes of sums, precision and recomputation."""
    axes = {axis: {value: AXES[axis][value] for value in values} for axis, values in _OF_TRIPLES.items()}
    plain = plainest()
    return [{**plain, **row} for row in covering(3, axes)]


# Each expert is split over two of four tensor-parallel ranks.
FOLDED: dict[str, Values] = {
    **AXES,
    "heads": {"8": _run(heads=8)},
    "tp": {"4": _tp(4), "4 split": _tp(4, tp_sequence_parallel=True, tp_loss_parallel=True)},
    "experts": {f"ep {ep}": _experts(ep, expert_tensor_parallel_size=2) for ep in (1, 2, 4)},
}


# Optimizers of whole tensors, in fp32: Muon's iteration multiplies small parts of a gradient by hundreds, and what 16
# bits round with them.
_NOT_OF_WHOLE = {"zenflow", "local steps", "bf16", "fp16", "autocast", "bf16 alone", "int8", "yes", "difference"}
WHOLE: dict[str, Values] = {
    axis: {
        value: keys
        for value, keys in values.items()
        if value not in _NOT_OF_WHOLE or axis not in ("state", "hybrid", "precision", "stored state", "wire")
    }
    for axis, values in AXES.items()
} | {
    "optimizer": {
        "Muon": {**_optimizer("Muon", eps=_EPS, muon_lr=0.02), **_run(bound=1e-4)},
        "Lamb": {**_optimizer("Lamb", eps=_EPS), **_run(bound=1e-5)},
    }
}


@dataclass(frozen=True)
class Refusal:
    """Values, of two or more axes, that the engine refuses together with the error ``code``."""

    values: Mapping[str, tuple[str, ...]]
    code: str


REFUSALS = (
    Refusal({"stage": ("0",), "state": ("host", "ahead", "ratio", "disk", "zenflow")}, "offload-stage"),
    Refusal({"tp": ("1",), "experts": ("ep 2 split",)}, "mesh"),
    Refusal({"ranks": ("1",), "hybrid": ("mics", "replicas", "local steps", "hpz")}, "mesh"),
    Refusal({"hybrid": ("local steps",), "experts": ("ep 2 moved",)}, "local-steps"),
    Refusal({"pp": ("2",), "backward": ("loss", "no_sync")}, "pipeline-call"),
    Refusal({"stage": ("3",), "wire": ("difference",)}, "wire-difference"),
    Refusal({"optimizer": ("1 bit",), "stage": ("1", "2", "3")}, "optimizer-sums"),
    Refusal({"optimizer": ("1 bit",), "wire": ("yes",)}, "optimizer-sums"),
    Refusal({"optimizer": ("1 bit",), "precision": ("bf16 alone",)}, "optimizer-sums"),
    Refusal({"optimizer": ("1 bit",), "stored state": ("int8",)}, "optimizer-sums"),
    Refusal({"optimizer": ("1 bit",), "hybrid": ("local steps",)}, "optimizer-sums"),
    # Of these another value of the stage is needed.
    Refusal({"optimizer": ("1 bit",), "state": ("host", "ahead", "ratio", "disk")}, "offload-stage"),
    Refusal({"state": ("zenflow",), "optimizer": ("momentum", "1 bit")}, "offload-stage"),
    Refusal({"state": ("zenflow",), "parameters": ("host", "disk")}, "offload-stage"),
    Refusal({"state": ("zenflow",), "precision": ("bf16 alone",)}, "offload-stage"),
    Refusal({"state": ("zenflow",), "hybrid": ("local steps",)}, "offload-stage"),
    Refusal({"state": ("zenflow",), "experts": ("ep 2 moved",)}, "offload-stage"),
    Refusal({"state": ("zenflow",), "wire": ("difference",)}, "offload-stage"),
    Refusal({"state": ("zenflow",), "stored state": ("int8",)}, "offload-stage"),
)
# By the first of their values. Pairs are found by a million calls of ``_is_refused``.
_REFUSALS_OF: dict[tuple[str, str], list[Refusal]] = {}
for _refusal in REFUSALS:
    _axis, _values = next(iter(_refusal.values.items()))
    for _value in _values:
        _REFUSALS_OF.setdefault((_axis, _value), []).append(_refusal)
# Neither refused at start-up nor run: a block that is called again is out of order in a pipeline, which its stage
# refuses in the forward; the mean of replicas that step apart is that of one process where the step is linear.
NOT_RUN = (
    {"pp": "2", "sharing": "twice"},
    {"hybrid": "local steps", "optimizer": "AdamW"},
    {"hybrid": "local steps", "optimizer": "client"},
    {"hybrid": "local steps", "clipping": "yes"},
    {"optimizer": "1 bit", "clipping": "yes"},  # by the norm of the ranks' own gradients
    {"hybrid": "local steps", "experts": "ep 4"},  # nothing else fits into 8 ranks
)
MOST_RANKS = 8  # of one combination; 4 that compile


@dataclass(frozen=True)
class Run:
    """What a test does beside the config, and how exact the result has to be.

    Args:
        ranks: data-parallel ones.
        is_ragged: some targets do not count, another number on each rank.
        is_varying: every other micro-batch has one row more.
        bound: largest difference of a parameter, relative to its largest value.
        compiled: "no", "blocks", each, or "model".
        is_backward_apart: backward runs in threads of its own.
        is_early: build the model under ``zero.Init``.
        is_cast: cast it before ``initialize``.
    """

    ranks: int = 2
    tp: int = 1
    sp: int = 1
    cp: int = 1
    pp: int = 1
    blocks: int = 3
    experts: int = 0
    is_ragged: bool = False
    is_varying: bool = False
    steps: int = 3
    bound: float = 0.0
    dtype: str = "float32"
    has_main: bool = True
    scale: float = 1.0
    autocast: bool = False
    is_host_separate: bool | None = None
    is_client: bool = False
    compiled: str = "no"
    style: str = "engine"
    is_backward_apart: bool = False
    between: str = "nothing"
    is_early: bool = False
    is_cast: bool = False
    is_tied: bool = True
    heads: int = 7
    kv_heads: int | None = None
    is_rotary: bool = False
    documents: str = "one"
    is_transposed: bool = False
    spare_width: int = 1  # of the feed-forward layer, which is odd by it: parts over tp are not equal
    sharing: str = "no"
    spare: str = "no"

    @property
    def world_size(self) -> int:
        return self.ranks * self.tp * self.sp * self.cp * self.pp


def plainest(axes: Mapping[str, Values] = AXES) -> dict[str, str]:
    """The first value of each axis."""
    return {axis: next(iter(values)) for axis, values in axes.items()}


def settings_of(combination: Combination, axes: Mapping[str, Values] = AXES) -> tuple[dict[str, Any], Run]:
    """The config of a combination, and what the test does beside it."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage3_param_persistence_threshold": 0},
    }
    for axis, value in combination.items():
        _merge(settings, axes[axis][value])
    return settings, Run(**settings.pop("run", {}))


def on_disk(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """A copy of a config, of which what is on disks is in ``folder``."""
    made = copy.deepcopy(settings)
    for section in made["zero_optimization"].values():
        if isinstance(section, dict) and section.get("device") == "nvme":
            section["nvme_path"] = folder
    return made


def _merge(into: dict[str, Any], fragment: Mapping[str, Any]) -> None:
    for key, value in fragment.items():
        if isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


def _is_refused(combination: Mapping[str, str]) -> bool:
    """Are values refused together of a combination, which may lack axes?"""
    return any(
        all(combination.get(axis) in values for axis, values in each.values.items())
        for pair in combination.items()
        for each in _REFUSALS_OF.get(pair, ())
    )


def num_ranks(combination: Mapping[str, str]) -> int:
    """The ranks of a combination, which may lack axes."""
    size = 1
    for axis in ("ranks", "tp", "sp", "cp", "pp"):
        size *= int(combination.get(axis, "1")[0])
    return size


def _cost(combination: Mapping[str, str]) -> int:
    """In ranks; one that compiles takes the time of two, and of four where it compiles for two shapes."""
    num_graphs = 0 if combination.get("compile") != "yes" else 2 if combination.get("rows") == "varying" else 1
    return num_ranks(combination) * 2**num_graphs


def is_allowed(combination: Mapping[str, str], most_ranks: int = MOST_RANKS) -> bool:
    """Nothing in a combination, which may lack axes, is refused, and it is not too large to run."""
    is_run = not any(each.items() <= combination.items() for each in NOT_RUN)
    return (
        is_run and _divides_experts(combination) and _cost(combination) <= most_ranks and not _is_refused(combination)
    )


def _can_be_completed(combination: Mapping[str, str], most_ranks: int) -> bool:
    """Are there ranks enough for the experts of a combination that lacks axes?"""
    experts = combination.get("experts", "no")
    split = {"tp": "2"} if experts.endswith("split") else {}
    replicas = 2 if combination.get("hybrid") == "local steps" else 1  # each has all experts at every stage
    of_experts = {"ranks": str(_ep(experts) * replicas), "pp": combination.get("pp", "1"), **split}
    compiled = {axis: combination[axis] for axis in ("compile", "rows") if axis in combination}
    return max(_cost({**split, **combination}), _cost({**of_experts, **compiled})) <= most_ranks


def _ep(experts: str) -> int:
    return 1 if experts == "no" else int(experts.split()[1])


def _divides_experts(combination: Mapping[str, str]) -> bool:
    """Do the expert-parallel ranks divide those that hold one copy of the state? True, where axes are lacking."""
    experts = combination.get("experts", "no")
    ep = _ep(experts)
    if ep == 1 or any(axis not in combination for axis in ("ranks", "tp", "sp", "cp", "stage", "hybrid")):
        return True
    groups = {"mics": int(combination["ranks"]) // 2, "replicas": 2, "local steps": 2}.get(combination["hybrid"], 1)
    if combination["stage"] == "0" and combination["hybrid"] != "local steps":
        groups = 1
    whole = {"pp": "1", **({"tp": "1"} if experts.endswith("split") else {})}
    holders = num_ranks({**combination, **whole}) // max(groups, 1)
    return holders % ep == 0


def refused() -> Iterator[tuple[Combination, str]]:
    """Every refused set of values, in an otherwise plain combination, with the code of its error."""
    plain = plainest() | {"ranks": "2"}
    for each in REFUSALS:
        for values in itertools.product(*each.values.values()):
            yield {**plain, **dict(zip(each.values, values, strict=True))}, each.code


Pair = tuple[str, str]  # an axis and one of its values


def covering(
    strength: int, axes: Mapping[str, Values] = AXES, seed: int = 0, *, most_ranks: int = MOST_RANKS
) -> list[Combination]:
    """Combinations in which any ``strength`` values of different axes occur together, unless they are refused.

    Each combination begins with a set of values that is not covered yet, and takes for each further axis the value that
    covers the most. Of some such combinations the best is kept. Where none of them can be completed (an early value may
    exclude all of a later axis), further ones take values at random.
    Source: Cohen et al., The AETG System (1997).
    """
    chosen = random.Random(seed)
    missing: dict[tuple[Pair, ...], None] = {}  # a dict, since a set has another order in each process
    for names in itertools.combinations(axes, strength):
        for values in itertools.product(*(axes[name] for name in names)):
            wanted = dict(zip(names, values, strict=True))
            if is_allowed(wanted, most_ranks) and _can_be_completed(wanted, most_ranks):
                missing[tuple(zip(names, values, strict=True))] = None
    order = {name: number for number, name in enumerate(axes)}
    found: list[Combination] = []
    while missing:
        first = dict(next(iter(missing)))
        rows: list[Combination] = []
        while len(rows) < 8 or (not any(rows) and len(rows) < 400):
            wanted = missing if len(rows) < 8 else {}
            rows.append(_complete(first, axes, wanted, strength, order, chosen, most_ranks))
        row = max(rows, key=lambda row: len(_covered(row, missing, strength)) / (1 + _cost(row)))
        if not (covered := _covered(row, missing, strength)):
            raise ValueError(f"{first} is refused together with every value of another axis")
        for values in covered:
            del missing[values]
        found.append({name: row[name] for name in axes})
    return found


@functools.cache
def all_pairs() -> tuple[Combination, ...]:
    """Combinations in which any two values of ``AXES`` occur together. Several files of tests run them."""
    return tuple(covering(2))


def _complete(
    first: Combination,
    axes: Mapping[str, Values],
    missing: Mapping[tuple[Pair, ...], None],
    strength: int,
    order: Mapping[str, int],
    chosen: random.Random,
    most_ranks: int,
) -> Combination:
    row = dict(first)
    for name in chosen.sample(others := [name for name in axes if name not in first], len(others)):
        allowed = [value for value in axes[name] if is_allowed({**row, name: value}, most_ranks)]
        if not allowed:
            return {}
        chosen.shuffle(allowed)
        if not missing:
            row[name] = allowed[0]
            continue
        gain = dict.fromkeys(allowed, 0)
        pairs = sorted(row.items(), key=lambda pair: order[pair[0]])
        before = [pair for pair in pairs if order[pair[0]] < order[name]]
        after = pairs[len(before) :]
        for number in range(strength):
            for begin, end in itertools.product(
                itertools.combinations(before, number), itertools.combinations(after, strength - 1 - number)
            ):
                for value in allowed:
                    gain[value] += (*begin, (name, value), *end) in missing
        row[name] = max(allowed, key=lambda value: (gain[value], -_cost({**row, name: value})))
    return {name: row[name] for name in axes}


def _covered(row: Combination, missing: Mapping[tuple[Pair, ...], None], strength: int) -> list[tuple[Pair, ...]]:
    return [values for values in itertools.combinations(row.items(), strength) if values in missing]


def named(combination: Combination) -> str:
    """A combination by the values that are not their axis's first, as a test's name."""
    return (
        ", ".join(f"{axis} {value}" for axis, value in combination.items() if value != next(iter(AXES[axis])))
        or "plain"
    )
