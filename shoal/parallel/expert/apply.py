"""Make the mixture-of-experts layers of a model ones whose experts can be divided among ranks, in place."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from shoal.comm.protocol import Communicator
from shoal.config.experts import ExpertParallel
from shoal.errors import ModelError
from shoal.parallel.expert.bias import add_bias, bias_of
from shoal.parallel.expert.extend import extend
from shoal.parallel.expert.held import modules_with_experts
from shoal.parallel.expert.huggingface import INTERFACE, Dispatch, check_experts, is_stack, use_experts
from shoal.parallel.expert.own_layouts import adapt
from shoal.parallel.expert.patterns import (
    PRESETS,
    ExpertParallelBlock,
    ExpertPreset,
    config_of,
    find_layers,
    has_name,
    preset_of,
    router_keys,
)
from shoal.parallel.expert.router import replace_router
from shoal.parallel.expert.stacked import ExpertFeedForward


def prepare_experts(
    model: nn.Module, comm: Communicator | None, section: ExpertParallel, *, is_part: bool = False
) -> list[str]:
    """Let Shoal compute the experts of a model of Transformers, or of one whose layers patterns name.

    Stacked parameters stay whole (``divide`` keeps this rank's experts of them); of lists this rank's experts are kept.
    The router stays the model's own, except of lists, and where a key of the config changes it.

    Args:
        comm: the ranks of expert parallelism; None: there is one.
        is_part: other ranks have other layers of the model, so this part may have no experts.

    Returns: the names of the modules that hold the experts. Without ``section.enabled`` on one rank: none.
    Raises: ModelError: no expert layer is found, or one does not fit the preset. ConfigError: the experts cannot be
        divided among the ranks.
    Communicates: nothing.
    """
    if section.load_balance_coeff is not None:
        _add_biases(model)
    if comm is None and not section.enabled:
        return []
    preset = preset_of(model, section)
    layers = [] if preset is None else list(find_layers(model, preset, section))
    found = {f"{layer.name}.{layer.names.experts}": layer.experts for layer in layers}
    if section.preset_model is None and section.moe_layer_pattern is None:
        found.update((name, module) for name, module in model.named_modules() if is_stack(module))
    if not found:
        if any(True for _ in modules_with_experts(model)):
            _check_named(model, preset, section)
            return []  # the model's layers are Shoal's already
        if is_part:
            return []
        raise _nothing_found(model, preset, section)
    if not layers and (keys := router_keys(section)):
        raise ModelError(
            f"expert_parallel.{keys[0]} is about routers, and it is not known which modules of"
            f" {type(model).__name__} are routers.",
            do="set moe_layer_pattern, router_pattern and expert_pattern, or leave the key out: the model's own routers"
            " stay.",
            code="expert-parallel-preset",
        )
    for name, module in found.items():
        check_experts(name, module, comm)
    dispatch = Dispatch(section.score_apply == "pre", section.overlap)
    for layer in layers:
        adapt(layer.block, layer.experts)
        if layer.routing is not None:
            replace_router(layer.router, layer.routing, needs_bias=section.load_balance_coeff is not None)
        if layer.returns_logits is not None:
            names = layer.names
            extend(layer.block, ExpertParallelBlock, layer_names=names, returns_logits=layer.returns_logits)
    for module in found.values():
        is_before = section.score_apply == "auto" and getattr(module, "score_before", False)
        use_experts(
            module,
            comm,
            replace(dispatch, score_before=True) if is_before else dispatch,
            is_gathered_if_used=section.gather_if_used,
        )
    return list(found)


def _add_biases(model: nn.Module) -> None:
    """Give the routers of Shoal's GPT a bias to choose by."""
    for module in model.modules():
        if isinstance(module, ExpertFeedForward):
            num_experts = module.experts.experts_held.num_experts
            if bias_of(module.router, num_experts) is None:
                add_bias(module.router, num_experts)


def _check_named(model: nn.Module, preset: ExpertPreset | None, section: ExpertParallel) -> None:
    """Raises: ModelError: the config names layers, and the model has none of that name."""
    is_named = section.preset_model is not None or section.moe_layer_pattern is not None
    if is_named and preset is not None and not any(has_name(name, preset) for name, _ in model.named_modules()):
        raise _nothing_found(model, preset, section)


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
