"""Plans: which module is split how, as data; and the plan for a model.

    {"layers.*.self_attn.q_proj": "column", "layers.*.self_attn.o_proj": "row", "lm_head": "vocab_head"}

``*`` stands for one part of a name, such as an index. A key may leave out the beginning of a name ("layers.*" for
"model.layers.*"). The styles are those of ``STYLES``; the names of Transformers' plans are accepted too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from torch import nn

from shoal.errors import ModelError
from shoal.parallel.tensor.families import (
    ATTENTION_RULES,
    FEED_FORWARD_RULES,
    REPLICATED_LINEARS,
    AttentionRule,
    FeedForwardRule,
    base_of,
    is_conv1d,
)
from shoal.text import did_you_mean

Plan = Mapping[str, str]

Kind = Literal[
    "column", "row", "vocab", "vocab_head", "column_gather_output", "row_split_input",
    "prepare_input", "replicate", "replicate_sum_gradient", "skip",
]  # fmt: skip

STYLES: Mapping[Kind, str] = {
    "column": "output elements split; column:3: inside three equal fused blocks, column:64,16,16: of these sizes",
    "row": "input elements split, outputs summed",
    "vocab": "an embedding split along the vocabulary",
    "vocab_head": "a linear to logits, split along the vocabulary; the logits are gathered, or with loss_parallel stay "
    "split",
    "column_gather_output": "as column; the outputs are gathered",
    "row_split_input": "as row, of an input that every rank has whole",
    "prepare_input": "a module around column linears, whose input enters the split region once for all of them",
    "replicate": "whole on every rank",
    "replicate_sum_gradient": "whole on every rank; the gradient is summed over the ranks",
    "skip": "whole on every rank, with all its submodules",
}

ALIASES: Mapping[str, str] = {
    "colwise": "column",
    "rowwise": "row",
    "local_colwise": "column",
    "local_rowwise": "row",
    "packed_colwise": "column:2",
    "local_packed_colwise": "column:2",
    "colwise_rep": "column_gather_output",
    "colwise_gather_output": "column_gather_output",
    "rowwise_rep": "row_split_input",
    "rowwise_split_input": "row_split_input",
    "embedding_rowwise": "vocab",
    "replicated": "replicate",
    "mla_kv_a_proj": "replicate",
    "replicated_with_grad_allreduce": "replicate_sum_gradient",
    "sequence": "replicate",  # under sequence parallelism every whole module of a layer is computed on a part of it
    "sequence_parallel": "replicate",
}
"""Names of Transformers, PyTorch and Megatron, and what they are here."""

_WEAK = ("replicate", "column_gather_output", "row_split_input")  # a rule's style replaces these of Transformers' plan


def plan_error(what: str, *, do: str, where: str = "") -> ModelError:
    """A plan is wrong, or does not fit the model."""
    return ModelError(what, where=where, do=do, code="tensor-parallel-plan")


def split_error(what: str, *, do: str) -> ModelError:
    """A model cannot be split over these ranks, or as it is asked for."""
    return ModelError(what, do=do, code="tensor-parallel")


@dataclass(frozen=True)
class ParallelStyle:
    """A style of a plan: the kind, and the fused blocks of a column's output (one number: that many equal blocks)."""

    kind: Kind
    blocks: tuple[int, ...] = (1,)

    def block_sizes(self, numel: int) -> tuple[int, ...]:
        """The sizes of the blocks of ``numel`` output elements; empty where they do not add up to it."""
        if len(self.blocks) > 1:
            return self.blocks if sum(self.blocks) == numel else ()
        (num_blocks,) = self.blocks
        return (numel // num_blocks,) * num_blocks if numel % num_blocks == 0 else ()


def parse_style(text: str, key: str) -> ParallelStyle:
    """The style that ``text`` names.

    Raises: ModelError: there is none of this name.
    """
    kind, colon, blocks = ALIASES.get(text, text).partition(":")
    sizes = tuple(int(size) if size.strip().isdigit() else 0 for size in blocks.split(",")) if colon else (1,)
    if kind not in get_args(Kind) or min(sizes) < 1 or (colon and kind != "column"):
        raise plan_error(
            f"the plan asks for {key!r}: {text!r}, but there is no such style{did_you_mean(kind, STYLES) or '.'}",
            do=f"take one of {', '.join(STYLES)}, or column:N for N fused blocks.",
        )
    return ParallelStyle(cast(Kind, kind), sizes)


def match(plan: Plan, names: Sequence[str]) -> dict[str, str]:
    """The key of ``plan`` that names each module.

    Raises: ModelError: keys that name no module, or modules named by two keys, with all names.
    """
    keys_of: dict[str, list[str]] = {}
    unmatched = []
    for key in plan:
        pattern = re.escape(key).replace(r"\*", "[^.]+")
        matched = [name for name in names if re.fullmatch(pattern, name)]
        matched = matched or [name for name in names if re.fullmatch(rf"(?:.+\.)?{pattern}", name)]
        if not matched:
            unmatched.append(key)
        for name in matched:
            keys_of.setdefault(name, []).append(key)
    if unmatched:
        known = sorted({generic(name) for name in names if name})
        raise plan_error(
            f"the tensor parallel plan names modules that the model does not have: {', '.join(unmatched)}"
            f"{did_you_mean(unmatched[0], known) or '.'}",
            do="correct or delete these keys; names are those of model.named_modules(), with * for one part.",
        )
    twice = {name: keys for name, keys in keys_of.items() if len(keys) > 1}
    if twice:
        listed = "; ".join(f"{name} by {' and '.join(keys)}" for name, keys in list(twice.items())[:8])
        more = f"; and {len(twice) - 8} more" if len(twice) > 8 else ""
        raise plan_error(
            f"the tensor parallel plan names {len(twice)} modules twice: {listed}{more}.",
            do="leave one key for each module.",
        )
    return {name: keys[0] for name, keys in keys_of.items()}


def generic(name: str) -> str:
    """A name with ``*`` for every index."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def plan_for(
    model: nn.Module,
    *,
    layer_specs: Sequence[Mapping[str, Any]] = (),
    use_default_specs: bool = True,
    keep: Callable[[Mapping[str, str]], dict[str, str]] = dict,
) -> dict[str, str]:
    """The plan for a model: DeepSpeed's ``layer_specs``, then Transformers' own plan, then the rules for families.

    Transformers' own plan is followed where it splits a module. Where it says nothing, or gathers or replicates what a
    rule splits (fused projections), the rules for families hold. The embedding and the head that the model names are
    split along the vocabulary.

    Args:
        layer_specs: DeepSpeed's ``partition_config.layer_specs``.
        use_default_specs: False: only ``layer_specs`` are looked at.
        keep: returns the styles by module that are kept, of all but those of ``layer_specs``.

    Raises: ModelError: a model without anything to split, or a layer spec that cannot be followed.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    styles: dict[str, str] = {}
    if use_default_specs:
        styles.update(_transformers_plan(model, modules))
        styles.update(by_rules(modules, styles, (*ATTENTION_RULES, *FEED_FORWARD_RULES)))
        styles.update(_vocabulary(model, modules))
        for name, module in modules.items():
            if name not in styles and is_linear(module) and generic(name).endswith(REPLICATED_LINEARS):
                styles[name] = "replicate"
    styles = keep(styles)
    styles.update(_by_layer_specs(layer_specs, modules, model))
    if not any(parse_style(style, name).kind in ("column", "row", "vocab") for name, style in styles.items()):
        raise plan_error(
            f"no rule splits anything of {type(model).__name__}.",
            do='pass a plan: {"layers.*.up": "column", "layers.*.down": "row"}.',
        )
    return _with_wildcards(styles, modules)


def is_linear(module: nn.Module) -> bool:
    """True if the module is a linear layer of torch or of GPT-2 (Conv1D), wrapped by a LoRA layer or not."""
    base = base_of(module)
    return isinstance(base, nn.Linear) or is_conv1d(base)


def _transformers_plan(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """What Transformers says of the model's modules: ``base_model_tp_plan`` and ``_tp_plan``. Experts stay whole."""
    plan = dict(getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {})
    plan.update(getattr(model, "_tp_plan", None) or {})
    styles: dict[str, str] = {}
    for key, style in plan.items():
        pattern = re.compile(r"(?:.+\.)?" + re.escape(key).replace(r"\*", "[0-9]+"))
        known = style in ALIASES or style in STYLES
        styles.update({name: ALIASES.get(style, style) for name in modules if known and pattern.fullmatch(name)})
    return styles


def by_rules(
    modules: Mapping[str, nn.Module], given: Mapping[str, str], rules: Sequence[AttentionRule | FeedForwardRule]
) -> dict[str, str]:
    """The styles of modules that the rules describe, where ``given`` says nothing better."""
    styles: dict[str, str] = {}
    for parent, module in modules.items():
        rule = next((rule for rule in rules if rule.describes(module)), None)
        for child, style in ({} if rule is None else rule.styles()).items():
            name = join(parent, child)
            if style == "prepare_input" or given.get(name, "replicate") in _WEAK:
                styles[name] = style
    return styles


def _vocabulary(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The embedding and the head, where the model has Transformers' methods for them or Shoal's names."""
    styles = {}
    for getter, attribute, style in (
        ("get_input_embeddings", "embedding", "vocab"),
        ("get_output_embeddings", "head", "vocab_head"),
    ):
        module = getattr(model, getter)() if hasattr(model, getter) else getattr(model, attribute, None)
        for name, candidate in modules.items():
            if candidate is module and getattr(getattr(candidate, "weight", None), "dim", lambda: 0)() == 2:
                styles[name] = style
    return styles


def _by_layer_specs(
    specs: Sequence[Mapping[str, Any]], modules: Mapping[str, nn.Module], model: nn.Module
) -> dict[str, str]:
    """The styles of DeepSpeed's ``layer_specs``; the first spec that matches a module's weight holds."""
    model_type = str(getattr(getattr(model, "config", None), "model_type", "")).lower()
    styles: dict[str, str] = {}
    for number, spec in enumerate(specs):
        kind = spec.get("partition_type", "column")
        if kind not in ("column", "row", "skip"):
            raise plan_error(
                f"partition_config.layer_specs[{number}] has partition_type {kind!r}.",
                do="take column, row or skip.",
            )
        if spec.get("model_types") and model_type not in [name.lower() for name in spec["model_types"]]:
            continue
        style = "column_gather_output" if kind == "column" and spec.get("gather_output") else kind
        matched = [
            name
            for name, module in modules.items()
            if getattr(base_of(module), "weight", None) is not None
            and any(re.match(pattern, f"{name}.weight") for pattern in spec["patterns"])
        ]
        if not matched:
            raise plan_error(
                f"partition_config.layer_specs[{number}] matches no weight: {', '.join(spec['patterns'])}.",
                do="correct the patterns; they are matched with the names of parameters from their beginning.",
            )
        if style == "column" and spec.get("shape"):
            style = f"column:{_blocks(spec, number)}"
        for name in matched:
            styles.setdefault(name, style)
    return styles


def _blocks(spec: Mapping[str, Any], number: int) -> str:
    """The blocks of a fused weight: ``shape`` is [number of blocks or their sizes, -1]; dim 0 is split inside each."""
    first = spec["shape"][0]
    if spec.get("partition_dim", 0) not in (0, None) or len(spec["shape"]) != 2:
        raise plan_error(
            f"partition_config.layer_specs[{number}] has shape {spec['shape']} and partition_dim "
            f"{spec.get('partition_dim')}, which cannot be followed.",
            do="give a shape of two entries, [number of fused blocks or list of their sizes, -1], and partition_dim 0.",
        )
    return str(first) if isinstance(first, int) else ",".join(str(size) for size in first)


def _with_wildcards(styles: Mapping[str, str], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """``styles`` with ``*`` for indices wherever all modules of such a name have the same style."""
    by_pattern: dict[str, set[str | None]] = {}
    for name in modules:
        by_pattern.setdefault(generic(name), set()).add(styles.get(name))
    plan: dict[str, str] = {}
    for name, style in styles.items():
        plan[generic(name) if len(by_pattern[generic(name)]) == 1 else name] = style
    return plan


def is_inside(name: str, parents: Iterable[str]) -> bool:
    """True if a module or parameter is inside one of the modules ``parents``."""
    return any(name.startswith(f"{parent}.") for parent in parents)


def join(parent: str, child: str) -> str:
    """The dotted name of a submodule."""
    return ".".join(name for name in (parent, child) if name)
