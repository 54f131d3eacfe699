"""What this version does with each key.

A key that is declared in a class is supported, except for those listed here; the keys of ``unsupported.txt`` are not.
A path may end in ``**`` (everything below); the longest path that fits a key is the one that counts. A key that is
*not built* or *refused* is an error only when the file asks for something with it: its default, false, null, "none"
and 0 ask for nothing, and neither does a key below a section that is not switched on (``enabled``, ``device``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from shoal.config.tables import all_rows

SWITCHES = ("enabled", "device")  # keys that turn the section they are in on and off

SupportKind = Literal["supported", "no effect", "not built", "refused"]


@dataclass(frozen=True)
class Support:
    """What happens with a key.

    Args:
        reason: why it has no effect; the part that is missing; or what to use in a refused key's place.
        switch: the key that must be on before this one asks for anything; empty: ``enabled`` or ``device`` above it.
        harmless: more values that ask for nothing.
        stands_alone: it counts even where its section is switched off.
        instead: what to do where it is not built.
    """

    kind: SupportKind
    reason: str = ""
    switch: str = ""
    harmless: tuple[Any, ...] = ()
    stands_alone: bool = False
    instead: str = "leave it out for now"

    def __str__(self) -> str:
        if self.kind == "not built":
            return f"not built yet: {self.reason}"
        return f"{self.kind}: {self.reason}" if self.reason else self.kind


SUPPORTED = Support("supported")


def no_effect(reason: str) -> Support:
    return Support("no effect", reason)


OFFLOAD = "zero_optimization.offload_optimizer"
# Keys of DeepSpeed's DeepCompile, and the sections that are moved to the host.
DEEPCOMPILE = {
    "offload_activation": "offload_activation",
    "offload_opt_states": OFFLOAD,
    "offload_parameters": "zero_optimization.offload_param",
}


def _of_table() -> Iterator[tuple[str, Support]]:
    """The rules of the sections that are not supported."""
    for row in all_rows():
        if not row.support:
            continue
        kind, _, reason = row.support.partition(": ")
        harmless = tuple(json.loads(value) for value in row.conditions_of("harmless"))
        switch = "".join(row.conditions_of("switch"))
        support = Support(cast(SupportKind, kind), reason, switch, harmless, bool(row.conditions_of("stands")))
        if row.is_section:
            yield f"{row.path}.**", support
        if not row.is_section or row.takes.endswith("or null"):
            yield row.path, support


SUPPORT: dict[str, Support] = {
    **dict(_of_table()),
    # Keys that are declared in the classes because code reads them, or because they share a type with others there.
    f"{OFFLOAD}.buffer_count": no_effect("the state of three units is in memory: the previous one, this one, the next"),
    f"{OFFLOAD}.pipeline_read": no_effect("the next state is always read while this one is updated"),
    f"{OFFLOAD}.pipeline_write": no_effect("the last state is always written while this one is updated"),
    "optimizer.legacy_fusion": Support("refused", "the step already works on flat memory; leave it out"),
    "activation_checkpointing.partition_activations": no_effect(
        "there is one model-parallel rank: no other has the same activations"
    ),
    "activation_checkpointing.number_checkpoints": no_effect("no memory is reserved in advance"),
    "activation_checkpointing.contiguous_memory_optimization": no_effect("saved activations are left to the allocator"),
    "activation_checkpointing.synchronize_checkpoint_boundary": no_effect("the order of the device's stream is enough"),
    # Of every layer with experts, also of a model that has them without this section.
    "expert_parallel.load_balance_coeff": Support("supported", stands_alone=True),
    "expert_parallel.rebalance_every": Support("supported", stands_alone=True),
    "expert_parallel.hot_experts": Support("supported", stands_alone=True),
    "expert_parallel.gather_if_used": Support("supported", stands_alone=True),
    "expert_parallel.expert_tensor_parallel_size": Support("supported", stands_alone=True),
    # What deepcompile stands for, as normalise rewrites it.
    "compile.deepcompile": Support("supported", stands_alone=True),
    **{f"compile.{name}": Support("supported", switch="compile.deepcompile") for name in DEEPCOMPILE},
    "elasticity.min_time": no_effect("the job's scheduler decides when the number of ranks changes"),
    "elasticity.model_parallel_size": Support("not built", "elastic runs with model-parallel ranks", harmless=(1,)),
}

# Parameters of the optimizers whose support is not "supported".
PARAMS: dict[str, Support] = {
    "torch_adam": no_effect(
        "the fastest implementation is chosen; all give the same numbers"
        " (AdamW without weight_decay takes torch's 0.01)"
    ),
    "fp32_optimizer_states": no_effect("set precision.state_dtype or bf16.bf16_optimizer_states instead"),
    "set_grad_none": no_effect("gradients are always released after the step"),
    "comm_backend_name": no_effect("the mesh's own communicator is used"),
    "cuda_aware": no_effect("the mesh's own communicator is used"),
}


@cache
def support_of(path: str) -> Support:
    """The support of a key, by its path in the schema: a key without a line is supported."""
    if path in SUPPORT:
        return SUPPORT[path]
    parts = path.replace("[]", "").split(".")
    rules = (".".join(parts[:length]) + ".**" for length in range(len(parts) - 1, 0, -1))
    return next((SUPPORT[rule] for rule in rules if rule in SUPPORT), SUPPORTED)
