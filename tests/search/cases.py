"""A case of the search: options by name, of which only those differ from the plain ones are written down.

``draw`` makes a case from a seed, ``complete`` removes what means nothing in it (a schedule without pipeline stages),
``config`` is its configuration.
"""

from __future__ import annotations

import random
from typing import Any

from tests.search.models import FAMILIES, LAYERS, ROWS

Case = dict[str, Any]

# The first value of each is the plain one; a value that is written several times is drawn more often.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "model": tuple(FAMILIES),
    "stage": (0, 1, 2, 3, 3),
    "dp": (1, 2, 2, 4),
    "tp": (1, 1, 2, 2, 4),
    "sp": (1, 1, 1, 2),
    "cp": (1, 1, 1, 2),
    "pp": (1, 1, 2, 2, 4),
    "ep": (1, 2, 2, 4),
    "etp": (1, 1, 2),  # tensor-parallel ranks of each expert
    "tp_sequence": (False, True),
    "tp_loss": (False, False, True),
    "tp_overlap": (False, False, False, True),
    "schedule": ("1f1b", "gpipe", "zb_h1", "zbv", "interleaved_1f1b", "interleaved_zero_bubble", "dualpipev"),
    "interval": (0, 0, 0, 2),  # blocks of a stage that are recomputed together
    "accumulation": (1, 2, 3),
    # How micro-batches become a step; those in ``no_sync`` are the others than the last, or every second one.
    "passes": ("counted", "counted", "no_sync", "mixed", "coalesced", "unmanaged", "boundaries", "scaled"),
    "sums": ("default", "default", "default", "prescaled", "predivided", "fp32"),
    "sparse": (False, False, False, True),
    "precision": ("fp32", "fp32", "fp32", "bf16", "fp16", "autocast"),
    "offload": ("none", "none", "none", "optimizer", "parameters", "ratio", "disk", "ahead", "zenflow"),
    "recompute": ("none", "none", "blocks", "matmul", "host", "offload", "budget", "budget offload", "model"),
    "compiled": (False, False, False, True),
    "optimizer": ("AdamW", "AdamW", "SGD", "Adagrad", "client", "client groups"),
    "clip": (0.0, 0.05),
    "by_tokens": (False, True),
    "ragged": (False, True),
    "padded": (False, False, True),
    "packed": (False, False, True),  # documents, told by their positions
    "built": ("plainly", "plainly", "meta", "zero.Init"),
    "lora": (False, False, False, True),
    "attention": ("exact", "exact", "shoal"),
    "hybrid": ("none", "none", "none", "mics", "replicas", "hpz"),
    "overlap": ("default", "default", "none", "gather"),
    "small": (0, 0, 60),  # stage 3: parameters of so few elements are not sharded
    "buckets": ("wide", "wide", "narrow"),
    "gathering": ("ahead", "ahead", "late", "kept"),
    "rebalance": (False, False, True),
    "expert_overlap": (False, False, True),
    "if_used": (False, False, True),  # read and gather only experts that some token uses
    "order": ("default", "default", "reversed"),  # of the axes of ranks
    "watch": ("nothing", "nothing", "checks", "profiles", "replica"),
    "between": (
        "nothing",
        "nothing",
        "nothing",
        "evaluate",
        "offload_states",
        "resume",
        "resume_async",
        "restart",
        "error",
    ),
    "then": (None,),  # another layout, in which the run goes on from a checkpoint
}
PLAIN = {name: values[0] for name, values in OPTIONS.items()}
LAYOUT = ("stage", "dp", "tp", "sp", "cp", "pp", "ep", "schedule", "offload", "hybrid")
SCHEDULES_OF_TWO = ("zbv", "dualpipev", "interleaved_1f1b", "interleaved_zero_bubble")  # stages of each rank
MOST_RANKS = 4
STEPS = 3


def is_moe(case: Case) -> bool:
    return FAMILIES[case["model"]].has_experts


def world_size(case: Case) -> int:
    size: int = case["dp"] * case["tp"] * case["sp"] * case["cp"] * case["pp"]
    return size


def short(case: Case) -> Case:
    """Without plain values."""
    return {name: value for name, value in case.items() if value != PLAIN[name] or name == "model"}


def complete(case: Case) -> Case | None:
    """All options, without those that mean nothing in this case; None: no run at all."""
    case = {**PLAIN, **case}
    family = FAMILIES[case["model"]]
    if world_size(case) > MOST_RANKS:
        return None
    plain: set[str] = set()
    if case["pp"] == 1:
        plain |= {"schedule", "interval"}
    else:
        plain.add("passes")
    if case["passes"] in ("no_sync", "mixed") and case["accumulation"] == 1:
        plain.add("passes")
    elif case["pp"] == LAYERS:
        plain.add("interval")
        if case["schedule"] not in ("1f1b", "gpipe", "zb_h1"):
            plain.add("schedule")
    if case["interval"]:
        plain.add("recompute")
    if case["tp"] == 1:
        plain |= {"tp_sequence", "tp_loss", "tp_overlap", "etp"}
    if family.heads[0] % case["tp"] or (case["sp"] * case["cp"] > 1 and not family.has_sequences):
        return None
    if not family.has_experts or case["ep"] > world_size(case) // case["pp"]:
        plain |= {"ep", "etp", "rebalance", "expert_overlap"}
    elif case["ep"] == 1:
        plain |= {"rebalance", "expert_overlap"}
    if case["tp"] % case["etp"]:
        plain.add("etp")
    if case["stage"] < 3:
        plain |= {"small", "gathering"}
        if case["offload"] in ("parameters", "disk"):
            plain.add("offload")
        if case["hybrid"] in ("hpz", "mics"):
            plain.add("hybrid")
    if case["stage"] == 0:
        plain |= {"offload"}
    if case["dp"] < 2 or case["stage"] == 0 or case["ep"] > 1:
        plain.add("hybrid")
    if case["overlap"] == "gather" and case["stage"] not in (1, 2):
        plain.add("overlap")
    later = case["then"] or {}
    if case["sp"] * case["cp"] > 1 or later.get("sp", 1) * later.get("cp", 1) > 1:
        case["by_tokens"] = True  # parts of a sequence have different numbers of targets
        if family.config is not None:
            case["attention"] = "shoal"
    if family.config is None:
        plain |= {"lora", "padded", "attention"}
        if case["built"] == "meta":
            plain.add("built")
        if case["recompute"] == "model":
            plain.add("recompute")
    elif not family.has_sequences:
        plain.add("attention")
    if family.config is None or not family.is_shifted:
        plain.add("tp_loss")
    if not family.lora:
        plain.add("lora")
    if case["lora"] and case["built"] != "plainly":
        plain.add("built")
    if family.options.get("loss") in ("aux", "hook") and case["sp"] * case["cp"] > 1:
        plain.add("ragged")  # what blocks leave behind is over a rank's positions, which then count alike
    if case["optimizer"] not in ("AdamW", "Adam") and case["offload"] == "zenflow":
        plain.add("optimizer")
    if not family.has_experts or case["offload"] not in ("parameters", "disk"):
        plain.add("if_used")
    if world_size(case) > 2 or case["recompute"] in ("matmul", "host"):
        plain.add("compiled")  # each rank compiles by itself; recomputed blocks with a policy run uncompiled
    if world_size(case) > 1 and family.options.get("output_router_logits"):
        plain.add("compiled")  # while one thread compiles, Transformers collects what all threads record in one place
    if case["hybrid"] != "none" or case["ep"] > 1 or len(order(case)) < 2:
        plain.add("order")
    if case["padded"] or not (family.config and family.is_shifted and family.takes_positions and family.has_documents):
        plain.add("packed")
    if case["precision"] != "fp32" and (is_moe(case) and case["precision"] != "bf16"):
        plain.add("precision")  # rounding changes which experts a token uses
    if case["between"] == "error" and (case["pp"] > 1 or case["tp"] > 1 or case["then"]):
        plain.add("between")
    if case["recompute"].startswith("budget") and (case["pp"] > 1 or case["compiled"]):
        plain.add("recompute")
    if case["offload"] not in ("none", "zenflow") and case["optimizer"] == "Adagrad":
        plain.add("optimizer")
    for name in plain:
        case[name] = PLAIN[name]
    if case["then"]:
        after = complete({**case, **case["then"], "then": None, "between": "nothing"})
        if after is None:
            return None
        case["then"] = {name: after[name] for name in LAYOUT if after[name] != case[name]} or None
    return case


def order(case: Case) -> tuple[str, ...]:
    """The axes of more than one rank, the innermost first."""
    axes = {"tp": "tp", "sp": "sp", "cp": "cp", "dp": "dp_shard", "pp": "pp"}
    return tuple(axis for name, axis in axes.items() if case[name] > 1)


def draw(seed: int, models: tuple[str, ...] = tuple(FAMILIES)) -> Case:
    """The case of a seed: a model and layout, and some options beside them."""
    chosen = random.Random(seed)
    while True:
        case: Case = {"model": chosen.choice(models), **_layout(chosen)}
        others = [name for name in OPTIONS if name not in case and name != "then"]
        for name in others:
            if chosen.random() < 0.45:
                case[name] = chosen.choice(OPTIONS[name])
        if chosen.random() < 0.15:
            case["then"] = _layout(chosen)
        found = complete(case)
        if found is not None and (world_size(found) > 1 or chosen.random() < 0.2):
            return short(found)


def _layout(chosen: random.Random) -> Case:
    while True:
        names = ("stage", "dp", "tp", "sp", "cp", "pp", "ep", "schedule")
        case = {name: chosen.choice(OPTIONS[name]) for name in names}
        if world_size(case) <= MOST_RANKS:
            return case


def config(case: Case, folder: str) -> dict[str, Any]:
    """The configuration of a complete case."""
    family = FAMILIES[case["model"]]
    zero: dict[str, Any] = {"stage": case["stage"], "stage3_param_persistence_threshold": case["small"]}
    parallel: dict[str, Any] = {name: case[name] for name in ("tp", "sp", "cp", "pp") if case[name] > 1}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": case["accumulation"],
        "gradient_clipping": case["clip"],
        "zero_optimization": zero,
        "parallel": parallel,
    }
    if not case["optimizer"].startswith("client"):
        settings["optimizer"] = {"type": case["optimizer"], "params": optimizer_options(case)}
    if family.has_experts and case["ep"] > 1:
        parallel["ep"] = case["ep"]
        experts = {"expert_tensor_parallel_size": case["etp"], "overlap": 2 if case["expert_overlap"] else 1}
        settings["expert_parallel"] = {**experts, "rebalance_every": int(case["rebalance"])}
    if case["if_used"]:
        settings.setdefault("expert_parallel", {})["gather_if_used"] = True
    if case["tp"] > 1:
        parallel |= {"tp_sequence_parallel": case["tp_sequence"], "tp_loss_parallel": case["tp_loss"]}
        if case["tp_overlap"]:
            settings["tensor_parallel"] = {"tp_overlap_comm": True}
        if family.config is None:
            parallel["tp_plan"] = {
                "embedding": "vocab",
                **dict.fromkeys((f"blocks.*.{name}" for name in ("q_proj", "k_proj", "v_proj", "up")), "column"),
                **dict.fromkeys((f"blocks.*.{name}" for name in ("o_proj", "down")), "row"),
                "head": "vocab_head",
                **({"late": "replicate"} if family.options.get("is_late") else {}),
            }
    if case["pp"] > 1:
        settings["pipeline"] = {"schedule": case["schedule"], "activation_checkpoint_interval": case["interval"]}
        if case["schedule"] in SCHEDULES_OF_TWO:
            settings["pipeline"]["virtual_stages"] = 2
    if case["precision"] == "bf16":
        settings["bf16"] = {"enabled": True}
    elif case["precision"] == "fp16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 7}
    elif case["precision"] == "autocast":
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if case["offload"] == "disk":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
        zero["offload_param"] = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    elif case["offload"] != "none":
        keys = {"ratio": {"ratio": 0.5}, "ahead": {"super_offload": True}}
        zero["offload_optimizer"] = {"device": "cpu", **keys.get(case["offload"], {})}
        if case["offload"] == "parameters":
            zero["offload_param"] = {"device": "cpu"}
        if case["offload"] == "zenflow":  # each gradient is applied in its step, so the numbers are those of AdamW
            columns = {"topk_ratio": 0.5, "select_strategy": "step", "select_interval": 2}
            zero["zenflow"] = {"update_interval": 1, **columns}
    if case["recompute"] in ("blocks", "matmul", "host"):
        section: dict[str, Any] = {"modules": [family.block]}
        if case["recompute"] == "matmul":
            section["policy"] = "matmul"
        if case["recompute"] == "host":
            section["cpu_checkpointing"] = True
        settings["activation_checkpointing"] = section
    elif case["recompute"].startswith("budget"):
        settings["activation_checkpointing"] = {"modules": [family.block], "memory_budget": "20KiB"}
        if case["recompute"] == "budget offload":
            settings["activation_checkpointing"]["offload_every"] = 2
    elif case["recompute"] == "offload":
        settings["offload_activation"] = {"device": "cpu"}
    if case["by_tokens"]:
        settings["loss_reduction"] = "token"
    if case["hybrid"] == "mics":
        zero["mics_shard_size"] = max(case["dp"] // 2, 1)
    elif case["hybrid"] == "hpz":
        zero["zero_hpz_partition_size"] = 2
    elif case["hybrid"] == "replicas":
        parallel["dp_replicate"] = 2
    if case["overlap"] == "none":
        zero["overlap_comm"] = False
    elif case["overlap"] == "gather":
        zero["overlap_param_gather"] = True
    if case["sums"] == "prescaled":
        settings["prescale_gradients"] = True
    elif case["sums"] == "predivided":
        settings["gradient_predivide_factor"] = 2.0
    elif case["sums"] == "fp32":
        settings["communication_data_type"] = "fp32"
    if case["sparse"]:
        settings["sparse_gradients"] = True
    if case["passes"] == "unmanaged":
        settings["managed_gradient_accumulation"] = False
    if case["buckets"] == "narrow":
        zero["reduce_bucket_size"] = 40
    if case["gathering"] == "late":
        zero |= {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 100}
    elif case["gathering"] == "kept":
        zero["stage3_max_reuse_distance"] = 1_000_000_000
    if case["compiled"]:
        settings["compile"] = {"enabled": True}
    if case["order"] == "reversed":
        parallel["order"] = order(case)
    if case["between"] == "resume_async":
        settings["checkpoint"] = {"async_save": True}
    if case["watch"] == "checks":
        settings |= {"device_check": {"every": 1, "factor": 1e6}, "debug": {"replica_check_steps": 1}}
        settings |= {"loss_spike": {"action": "warn"}, "goodput": {"file": f"{folder}/log", "rank_times_every": 1}}
    elif case["watch"] == "profiles":
        settings |= {"flops_profiler": {"enabled": True, "output_file": f"{folder}/flops"}, "steps_per_print": 1}
        settings |= dict.fromkeys(("wall_clock_breakdown", "memory_breakdown"), True)
        settings |= {"comms_logger": {"enabled": True}, "csv_monitor": {"enabled": True, "output_path": folder}}
    return settings


def optimizer_options(case: Case) -> dict[str, Any]:
    """With a large ``eps`` an update is in proportion to the gradient, so that a wrong factor of it is seen."""
    if case["optimizer"] == "SGD":
        return {"lr": 0.05, "momentum": 0.9}
    if case["optimizer"] == "Adagrad":
        return {"lr": 0.02, "eps": 0.1}
    return {"lr": 0.01, "eps": 0.1, "weight_decay": 0.01}
