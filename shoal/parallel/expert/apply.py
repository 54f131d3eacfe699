"""Make the mixture-of-experts layers of a model ones whose experts can be divided among ranks, in place."""

from __future__ import annotations

from torch import nn

from shoal.comm.protocol import Communicator
from shoal.config.experts import ExpertParallel
from shoal.errors import ModelError
from shoal.parallel.expert.held import modules_with_experts
from shoal.parallel.expert.huggingface import INTERFACE, Dispatch, is_stack, use_list, use_stack
from shoal.parallel.expert.patterns import (
    PRESETS,
    ExpertLayer,
    ExpertParallelBlock,
    ExpertPreset,
    config_of,
    find_layers,
    preset_of,
    returns_logits,
)
from shoal.parallel.expert.router import replace_router
from shoal.parallel.tensor.layers import split_class


def prepare_experts(model: nn.Module, comm: Communicator | None, section: ExpertParallel) -> list[str]:
    """Let Shoal compute the experts of a model of Transformers, or of one whose layers patterns name.

    Stacked parameters stay whole (``divide`` keeps this rank's experts of them); of lists this rank's experts are kept.
    The router stays the model's own, except of lists, and where a key of the config changes it.

    Args:
        comm: the ranks of expert parallelism; None: there is one.

    Returns: the names of the modules that hold the experts. Without ``section.enabled`` on one rank: none.
    Raises: ModelError: no expert layer is found, or one does not fit the preset. ConfigError: the experts cannot be
        divided among the ranks.
    Communicates: nothing.
    """
    if comm is None and not section.enabled:
        return []
    preset = preset_of(model, section)
    layers = [] if preset is None else list(find_layers(model, preset, section))
    by_layer = {f"{layer.name}.{layer.names.experts}": layer for layer in layers}
    found = {name: layer.experts for name, layer in by_layer.items()}
    if not found and section.preset_model is None and section.moe_layer_pattern is None:
        found = {name: module for name, module in model.named_modules() if is_stack(module)}
    if not found:
        if any(True for _ in modules_with_experts(model)):
            return []  # the model's layers are Shoal's already
        raise _nothing_found(model, preset, section)
    dispatch = Dispatch(section.score_apply == "pre", section.overlap)
    for name, module in found.items():
        if isinstance(module, nn.ModuleList):
            use_list(name, module, comm, dispatch)
            _use_block(by_layer[name])
        else:
            use_stack(module, dispatch)
    for layer in layers:
        if layer.routing is not None:
            replace_router(layer.router, layer.routing, needs_bias=section.load_balance_coeff is not None)
    return list(found)


def _use_block(layer: ExpertLayer) -> None:
    logits = returns_logits(layer.block)
    layer.block.__class__ = split_class(type(layer.block), ExpertParallelBlock)
    # nn.Module declares tensors and modules as attributes; these are data.
    layer.block.layer_names = layer.names  # type: ignore[assignment]
    layer.block.returns_logits = logits  # type: ignore[assignment]


def _nothing_found(model: nn.Module, preset: ExpertPreset | None, section: ExpertParallel) -> ModelError:
    kind = getattr(config_of(model), "model_type", None)
    looked = []
    if preset is not None:
        looked.append(
            f"modules whose names end in {preset.layers!r} with the attributes {preset.router!r} and {preset.experts!r}"
        )
    if section.preset_model is None and section.moe_layer_pattern is None:
        looked.append(INTERFACE)
        if preset is None:
            looked.append(f"one of the presets {', '.join(PRESETS)}; the model's type is {kind}")
    return ModelError(
        f"{type(model).__name__} has no expert layer. Looked for: {'; '.join(looked)}.",
        do="set expert_parallel.moe_layer_pattern, router_pattern and expert_pattern to the names of its layers; or set"
        " expert_parallel.enabled to false and parallel.ep to 1.",
        code="expert-parallel-model",
    )
