"""Make the mixture-of-experts layers of a model ones whose experts can be divided among ranks, in place.

Layers are recognised by the interface of Transformers' experts, or by name: from the preset of a model family, or
patterns of the config.

    model.layers.3.mlp            the layer (``moe_layer_pattern``)
    model.layers.3.mlp.gate       its router (``router_pattern``)
    model.layers.3.mlp.experts    its experts (``expert_pattern``): Transformers' interface, or a list of modules

A layer whose experts are a list calls them in a loop of its own, so its ``forward`` is replaced.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.protocol import Communicator
from shoal.config.parallel import ExpertParallel
from shoal.errors import ModelError
from shoal.parallel.expert.bias import add_bias, bias_of
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.held import ListedExperts, modules_with_experts
from shoal.parallel.expert.huggingface import (
    INTERFACE,
    Dispatch,
    adapt,
    check_experts,
    extend,
    has_own_layout,
    is_stack,
    use_experts,
)
from shoal.parallel.expert.router import Routing, replace_router
from shoal.parallel.expert.stacked import ExpertFeedForward
from shoal.source import syntax_tree


@dataclass(frozen=True)
class ExpertPreset:
    """The names in one model family's layers, and how its router scores.

    Args:
        layers: regular expression; the end of a module's name.
        weights: of an expert in a list: gate, down, up (None: gate and up are one).
        num_experts, top_k: attributes of the model's config.
        normalises, scale: whether the weights sum to 1, and their factor; or the attribute of the model's config.
        groups: attributes of the model's config: the groups, and those that one token may use.
        shared, shared_gate: attributes of the layer; empty: there are none.
    """

    layers: str = r"layers\.\d+\.mlp"
    router: str = "gate"
    experts: str = "experts"
    weights: tuple[str, str, str | None] = ("gate_proj", "down_proj", "up_proj")
    num_experts: str = "num_experts"
    top_k: str = "num_experts_per_tok"
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalises: bool | str = "norm_topk_prob"
    scale: str = ""
    groups: tuple[str, str] | None = None
    group_score: Literal["max", "top2_sum"] = "max"
    in_fp32: bool = False
    shared: str = ""
    shared_gate: str = ""


_QWEN2 = ExpertPreset(shared="shared_expert", shared_gate="shared_expert_gate")
_DEEPSEEK = ExpertPreset(
    num_experts="n_routed_experts",
    scale="routed_scaling_factor",
    groups=("n_group", "topk_group"),
    in_fp32=True,
    shared="shared_experts",
)
PRESETS: dict[str, ExpertPreset] = {
    "mixtral": ExpertPreset(
        layers=r"layers\.\d+\.(?:mlp|block_sparse_moe)",
        weights=("w1", "w2", "w3"),
        num_experts="num_local_experts",
        normalises=True,
    ),
    "qwen2_moe": _QWEN2,
    "qwen3_moe": ExpertPreset(),
    "qwen3_5_moe": replace(_QWEN2, normalises=True),
    "deepseek_v2": replace(_DEEPSEEK, normalises=False),
    "deepseek_v3": replace(_DEEPSEEK, score="sigmoid", group_score="top2_sum"),
    "gpt_oss": ExpertPreset(router="router", num_experts="num_local_experts", normalises=True),
    "minimax_m3": ExpertPreset(
        num_experts="num_local_experts", score="sigmoid", normalises=True, shared="shared_experts"
    ),
    "llama4": ExpertPreset(
        layers=r"layers\.\d+\.feed_forward",
        router="router",
        num_experts="num_local_experts",
        score="sigmoid",
        normalises=False,
        shared="shared_expert",
    ),
    "dbrx": ExpertPreset(layers=r"blocks\.\d+\.ffn", router="router"),
}
_ROUTER_KEYS = (
    "score_func", "route_norm", "route_scale", "routed_scaling_factor", "top_k", "top_k_attr", "num_expert_groups",
    "num_limited_groups",
)  # fmt: skip
_DEFAULTS = ExpertParallel()


@dataclass(frozen=True)
class LayerNames:
    """The attributes of a layer; empty: it has none."""

    router: str
    experts: str
    shared: str = ""
    shared_gate: str = ""


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of experts in the model.

    Args:
        routing: of Shoal's router in place of the model's; None: the model's own stays.
        returns_logits: of Shoal's ``forward`` in place of the layer's; None: the layer's own stays.
    """

    name: str
    block: nn.Module
    names: LayerNames
    routing: Routing | None
    returns_logits: bool | None

    @property
    def router(self) -> nn.Module:
        return self.block.get_submodule(self.names.router)

    @property
    def experts(self) -> nn.Module:
        return self.block.get_submodule(self.names.experts)


class ExpertParallelBlock(nn.Module):
    """The layer around a list of experts: router, experts, shared experts."""

    layer_names: LayerNames
    dispatch: Dispatch
    returns_logits: bool

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        names = self.layer_names
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        jitter = getattr(self, "jitter_noise", None) or 0.0  # Mixtral's
        if self.training and jitter > 0:
            tokens = tokens * torch.empty_like(tokens).uniform_(1.0 - jitter, 1.0 + jitter)
        logits, weights, chosen = self.get_submodule(names.router)(tokens)
        experts = cast(ListedExperts, self.get_submodule(names.experts))
        out = self.dispatch(tokens, chosen, weights, experts, experts.experts_held)
        if names.shared:
            shared = self.get_submodule(names.shared)(tokens)
            if names.shared_gate:
                shared = F.sigmoid(self.get_submodule(names.shared_gate)(tokens)) * shared
            out = out + shared
        out = out.view(hidden_states.shape)
        return (out, logits) if self.returns_logits else out


def preset_of(model: nn.Module, section: ExpertParallel) -> ExpertPreset | None:
    """The names to look for, those of the config before those of the preset; None: the config has none."""
    name = section.preset_model or getattr(config_of(model), "model_type", None)
    preset = PRESETS.get(str(name).removesuffix("_text"))
    if preset is None:
        if section.moe_layer_pattern is None:
            return None
        preset = ExpertPreset()
    given: dict[str, Any] = {
        "layers": section.moe_layer_pattern,
        "router": section.router_pattern,
        "experts": section.expert_pattern,
        "num_experts": section.num_experts_attr,
        "top_k": section.top_k_attr,
        "score": None if section.score_func == "auto" else section.score_func,
        "normalises": section.route_norm,
        "shared": "" if section.has_shared_experts is False else section.shared_experts_pattern,
        "shared_gate": section.shared_experts_gate_pattern,
    }
    gate, down, up = preset.weights
    up = up if section.expert_w3 == "auto" else section.expert_w3
    weights = (section.expert_w1 or gate, section.expert_w2 or down, up)
    return replace(preset, weights=weights, **{key: value for key, value in given.items() if value is not None})


def has_name(name: str, preset: ExpertPreset) -> bool:
    """True if a module of this name may be a layer with experts."""
    try:
        return re.fullmatch(rf"(?:.+\.)?(?:{preset.layers})", name) is not None
    except re.error as error:
        raise _misfit(preset.layers, f"the pattern is not a regular expression: {error}") from error


def find_layers(model: nn.Module, preset: ExpertPreset, section: ExpertParallel) -> Iterator[ExpertLayer]:
    """The layers that fit the preset's pattern and have a router and experts.

    Raises: ModelError: a layer has one of the two, or its experts are of neither form, or lack an attribute.
    """
    for name, block in model.named_modules():
        if not has_name(name, preset):
            continue
        router, experts = _child(block, preset.router), _child(block, preset.experts)
        if router is None and experts is None:
            continue  # a dense layer
        if router is None or experts is None:
            attribute, what = (preset.router, "router") if router is None else (preset.experts, "experts")
            raise _misfit(name, f"{type(block).__name__} has no attribute {attribute!r}, its {what}")
        router_module, experts_module = block.get_submodule(router), block.get_submodule(experts)
        if hasattr(experts_module, "experts_held"):
            continue  # Shoal's already: an engine had the model before
        is_list = isinstance(experts_module, nn.ModuleList)
        num_experts = _check_experts(f"{name}.{experts}", experts_module, preset, config_of(model))
        needs_bias = section.load_balance_coeff is not None and bias_of(router_module, num_experts) is None
        routing = None
        if is_list or router_keys(section) or needs_bias:
            routing = routing_of(model, router_module, preset, section, num_experts)
            _check_router(f"{name}.{router}", router_module, num_experts)
        wanted = (preset.shared, preset.shared_gate)
        shared, shared_gate = (_child(block, attribute) if attribute else "" for attribute in wanted)
        if is_list and None in (shared, shared_gate):
            attribute = wanted[(shared, shared_gate).index(None)]
            raise _misfit(name, f"{type(block).__name__} has no attribute {attribute!r}, its shared experts")
        names = LayerNames(router, experts, shared or "", shared_gate or "")
        yield ExpertLayer(name, block, names, routing, _returns_logits(block) if is_list else None)


def router_keys(section: ExpertParallel) -> list[str]:
    """The keys that are set and that change a router."""
    return [key for key in _ROUTER_KEYS if getattr(section, key) != getattr(_DEFAULTS, key)]


def routing_of(
    model: nn.Module, router: nn.Module, preset: ExpertPreset, section: ExpertParallel, num_experts: int
) -> Routing:
    """How Shoal's router scores in place of ``router``: as the config says, else as the model does."""
    config = config_of(model)
    top_k = section.top_k if section.top_k != "auto" else getattr(config, preset.top_k, getattr(router, "top_k", None))
    if not isinstance(top_k, int) or not 0 < top_k <= num_experts:
        source = f"{preset.top_k} of the model's config" if section.top_k == "auto" else "expert_parallel.top_k"
        raise _misfit("the router", f"its experts for each token are {top_k!r} of {num_experts} ({source})")
    normalises, scale = preset.normalises, section.routed_scaling_factor
    if isinstance(normalises, str):
        normalises = bool(getattr(config, normalises, True))
    if scale == "auto":
        scale = float(getattr(config, preset.scale, None) or 1.0) if preset.scale else 1.0
    groups, limited = section.num_expert_groups, section.num_limited_groups
    if groups is None and preset.groups is not None and getattr(config, "topk_method", None) != "greedy":
        groups, limited = (getattr(config, name, None) for name in preset.groups)
    if groups is not None and num_experts % groups:
        raise _misfit("the router", f"{num_experts} experts cannot be divided into {groups} groups")
    return Routing(
        num_experts,
        top_k,
        preset.score,
        normalises,
        section.route_scale * scale,
        groups,
        limited,
        preset.group_score,
        preset.in_fp32,
    )


def _returns_logits(block: nn.Module) -> bool:
    """True if the source of the layer's own ``forward`` returns its output and the router's logits."""
    tree = syntax_tree(type(block).forward)
    if tree is None:
        return False
    sizes = {
        len(n.value.elts) if isinstance(n.value, ast.Tuple) else 1 for n in ast.walk(tree) if isinstance(n, ast.Return)
    }
    if sizes - {1, 2} or len(sizes) > 1:
        raise _misfit(
            type(block).__name__, f"its forward returns {sorted(sizes)} values, not the output, or it and the logits"
        )
    return sizes == {2}


def config_of(model: nn.Module) -> Any:
    """The model's configuration; of a composed one that of its text."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) else config


def _child(block: nn.Module, wanted: str) -> str | None:
    """The attribute of a layer that is called so, or whose name the expression matches."""
    names = dict(block.named_children())
    if wanted in names:
        return wanted
    try:
        return next((name for name in names if re.fullmatch(wanted, name)), None)
    except re.error:
        return None


def _check_experts(name: str, experts: nn.Module, preset: ExpertPreset, config: Any) -> int:
    """The number of experts. Raises: ModelError: they are of neither form, or lack an attribute."""
    if is_stack(experts) or has_own_layout(experts):
        return int(cast(Any, experts).num_experts)
    if not isinstance(experts, nn.ModuleList) or not len(experts):
        raise _misfit(name, f"{type(experts).__name__} is neither {INTERFACE}, nor a list of modules")
    for weight in preset.weights:
        if weight is not None and not hasattr(experts[0], weight):
            raise _misfit(f"{name}.0", f"{type(experts[0]).__name__} has no attribute {weight!r}")
    stated = getattr(config, preset.num_experts, len(experts))
    if stated != len(experts):
        raise _misfit(
            name, f"it has {len(experts)} experts, and {preset.num_experts} of the model's config is {stated}"
        )
    return len(experts)


def _check_router(name: str, router: nn.Module, num_experts: int) -> None:
    weight = getattr(router, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or len(weight) != num_experts:
        raise _misfit(name, f"{type(router).__name__} has no weight [{num_experts} experts, width]")


def _misfit(where: str, what: str) -> ModelError:
    return ModelError(
        f"{what}.",
        where=where,
        do="correct preset_model, or the patterns and names in expert_parallel; or leave them out: the layers are then"
        " found from the model.",
        code="expert-parallel-preset",
    )


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
    experts = {f"{layer.name}.{layer.names.experts}": layer.experts for layer in layers}
    if section.preset_model is None and section.moe_layer_pattern is None:
        experts.update((name, module) for name, module in model.named_modules() if is_stack(module))
    if not experts:
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
    for name, module in experts.items():
        check_experts(name, module, comm)
    score_before = section.score_apply == "pre"
    dispatch = partial(run_experts, score_before=score_before, overlap=section.overlap, may_drop=False)
    for layer in layers:
        adapt(layer.block, layer.experts)
        if layer.routing is not None:
            replace_router(layer.router, layer.routing, needs_bias=section.load_balance_coeff is not None)
        if layer.returns_logits is not None:
            made = {"layer_names": layer.names, "returns_logits": layer.returns_logits, "dispatch": dispatch}
            extend(layer.block, ExpertParallelBlock, **made)
    for module in experts.values():
        is_before = section.score_apply == "auto" and getattr(module, "score_before", False)
        use_experts(module, comm, partial(dispatch, score_before=True) if is_before else dispatch)
    return list(experts)


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
