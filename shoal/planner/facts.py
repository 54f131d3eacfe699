"""What the closed formulas need to know of a model: a block and all the rest, each as it runs on one device.

Two small models, of one and of two periods of blocks, run without an engine on the simulated machine. Their difference
is a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shoal.errors import UsageError
from shoal.flop_formulas import MATRIX
from shoal.parallel.saved_tensors import counting_saved
from shoal.pipeline.blocks import find_blocks
from shoal.planner.model_of import loss_of, token_batch
from shoal.planner.repeated_blocks import Repeats
from shoal.simulation.dry_run import dry_run
from shoal.simulation.machines import GpuNode
from shoal.simulation.modes import WithoutInitialValues
from shoal.simulation.times import COMPUTE


@dataclass(frozen=True)
class ModelPart:
    """A block, or what a model has outside its blocks. Figures are of one row of tokens, in bf16.

    Attributes: ``numel``: elements of dense parameters; ``expert_numel``: of experts. ``flops``: of matrix products in
    forward, masked ones included. ``forward``, ``backward``: seconds. ``saved``: bytes that backward needs.
    """

    numel: int
    expert_numel: int
    flops: int
    forward: float
    backward: float
    saved: int


@dataclass(frozen=True)
class ModelFacts:
    """A language model.

    Attributes: ``block``: the mean of a period. ``outer``: everything else, and the first blocks that differ.
    ``embedding_numel``: of ``outer``. ``peak``: bytes of activations of ``outer`` at most, in its backward.
    ``boundary``: bytes of a row between blocks. ``num_blocks``: those of all periods. ``period``: blocks that
    alternate;
    ``prefix``: first blocks that are unlike the rest. ``divisible``: by name, numbers that degrees have to divide.
    """

    num_blocks: int
    prefix: int
    period: int
    block_class: str
    sequence: int
    block: ModelPart
    outer: ModelPart
    embedding_numel: int
    peak: int
    boundary: int
    divisible: dict[str, int]

    @property
    def numel(self) -> int:
        """All parameters."""
        return self.num_blocks * (self.block.numel + self.block.expert_numel) + self.outer.numel

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward, without recomputation; the products of causal attention in full, as usual in MFU."""
        return 3 * (self.num_blocks * self.block.flops + self.outer.flops) / self.sequence


def facts_of(build: Callable[[], nn.Module], sequence: int, machine: GpuNode) -> ModelFacts:
    """Measure a model.

    Raises: UsageError: its blocks differ in more than their first ones; it is no language model, or does not run
        without values.
    """
    with torch.device("meta"), WithoutInitialValues():
        whole = build()
    found = find_blocks(whole)
    repeats, total, last = Repeats.of(whole), len(found.names), whole.get_submodule(found.name(len(found.names) - 1))
    prefix, period, kind = repeats.first, repeats.period, type(last).__name__
    if repeats.count < 2 or repeats.first + repeats.count * period != total:
        raise UsageError(
            f"the {total} blocks of the model do not repeat: `plan` reckons with a block and all its like.",
            do="compare configurations by shoal.dry_run, which runs every block.",
            code="plan-model",
        )
    config: Any = getattr(whole, "config", None)
    experts = [p for name, p in last.named_parameters() if ".experts." in f".{name}" and p.dim() > 1]
    one, two = (_run(build, prefix + count * period, sequence, machine) for count in (1, 2))
    numel, expert_numel, *rest = ((after - before) / period for before, after in zip(one[0], two[0], strict=True))
    flops, forward, backward, saved = rest
    block = ModelPart(int(numel), int(expert_numel), int(flops), forward, backward, int(saved))
    of_one = (one[0][0], one[0][1], *one[0][2:])
    outer = [value - period * each for value, each in zip(of_one, (numel, expert_numel, *rest), strict=True)]
    text: Any = getattr(config, "get_text_config", lambda: config)()
    heads: Any = getattr(text, "num_attention_heads", None) or getattr(text, "num_heads", 1)
    divisible = {"heads": heads, "key-value heads": getattr(text, "num_key_value_heads", None) or heads}
    if experts:
        divisible["experts"] = int(
            getattr(text, "num_experts", 0) or getattr(text, "num_local_experts", 0) or experts[0].shape[0]
        )
    return ModelFacts(
        num_blocks=total - prefix,
        prefix=prefix,
        period=period,
        block_class=kind,
        sequence=sequence,
        block=block,
        outer=ModelPart(int(outer[0] + outer[1]), 0, int(outer[2]), outer[3], outer[4], int(outer[5])),
        embedding_numel=one[1],
        peak=one[2] - int(period * block.saved),
        boundary=one[3],
        divisible=divisible,
    )


def keep_blocks(model: nn.Module, count: int) -> None:
    """Remove all but the first ``count`` blocks."""
    found = find_blocks(model)
    container = model.get_submodule(found.container)
    for name in found.names[count:]:
        del container._modules[name]


def _run(
    build: Callable[[], nn.Module], count: int, sequence: int, machine: GpuNode
) -> tuple[tuple[float, ...], int, int, int]:
    """The figures of ``ModelPart`` of a model of so many blocks; elements of embeddings; most activations; boundary."""
    boundary = 0

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        nonlocal boundary
        given = args[0] if args else next(iter(kwargs.values()))
        boundary = given.numel() * given.element_size()

    with dry_run(1, machine=machine) as run:
        with WithoutInitialValues():
            model = build()
        model = _in_bf16(model).train()
        keep_blocks(model, count)
        found = find_blocks(model)
        model.get_submodule(found.name(0)).register_forward_hook(note, with_kwargs=True)
        batch = token_batch(model, 1, sequence)

        def forward() -> torch.Tensor:
            return loss_of(model(**batch) if isinstance(batch, dict) else model(*batch))

        counter = FlopCounterMode(display=False, custom_mapping={op: _formula(op) for op in MATRIX})
        try:
            with run.step():
                loss = forward()
            with run.step():
                loss.backward()
            del loss
            with counting_saved(model.parameters()) as num_saved, counter:
                forward()
        except Exception as error:  # the model's own code, run without values
            raise UsageError(
                f"{type(model).__name__} does not run without values: {type(error).__name__}: {error}",
                do="leave out what reads values in its forward pass (`.item()`, `if tensor:`).",
                code="plan-model",
            ) from error
        named = dict(model.named_parameters())
        expert = sum(p.numel() for name, p in named.items() if ".experts." in name)
        embeddings = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
        first, second = run.steps
        flops, saved = counter.get_total_flops(), num_saved()
        numel = sum(p.numel() for p in named.values()) - expert
        peak = max(step.memory.by_kind.get("activation", 0) for step in (first, second)) - 2 * (numel + expert)
    # In a whole model a GPU's host is ahead; where it is not, the dry run of the model shows it.
    taken = [step.seconds if machine.is_cpu else step.busy[COMPUTE] for step in (first, second)]
    figures = (float(numel), float(expert), float(flops), *taken, float(saved))
    return figures, sum(embeddings.values()), peak, boundary


def _formula(operator: Any) -> Callable[..., int]:
    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return MATRIX[operator](args, kwargs, out_val)

    flops._get_raw = True  # type: ignore[attr-defined]  # FlopCounterMode then gives tensors, not shapes
    return flops


def _in_bf16(model: nn.Module) -> nn.Module:
    """The model with bf16 parameters; tied ones stay tied. ``Module.to`` cannot, under a simulation."""
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                made = nn.Parameter(parameter.to(torch.bfloat16), parameter.requires_grad)
                module._parameters[name] = cast.setdefault(id(parameter), made)
    return model
