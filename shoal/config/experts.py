"""The section `expert_parallel`: mixture-of-experts layers whose experts are divided among ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from shoal.config.base import Auto, Section, key
from shoal.config.parallel import Degree
from shoal.config.problems import Problem
from shoal.config.tables import with_unsupported
from shoal.text import did_you_mean

PRESETS = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "minimax_m3",
    "llama4", "dbrx",
)  # fmt: skip


@with_unsupported("expert_parallel")
class ExpertParallel(Section):
    """Experts divided among ranks (AutoEP). `parallel.ep` gives the ranks as well, and enables the section."""

    enabled: bool = key(False, "divide the experts of the model's mixture-of-experts layers among ranks")
    autoep_size: int = key(1, "expert-parallel ranks", ge=1)
    expert_tensor_parallel_size: int = key(
        1, "tensor-parallel ranks over which each expert is split; a divisor of their number", ge=1
    )
    preset_model: str | None = key(
        None, f"names of a model family's layers: {', '.join(PRESETS)}; null: found from the model"
    )
    moe_layer_pattern: str | None = key(
        None, "regular expression for the end of a module's name: the mixture-of-experts layers; null: by preset"
    )
    router_pattern: str | None = key(None, "attribute that holds the router, or a regular expression over its name")
    expert_pattern: str | None = key(None, "attribute that holds the experts, or a regular expression over its name")
    expert_w1: str | None = key(None, "name of an expert's first weight (gate)")
    expert_w2: str | None = key(None, "name of an expert's second weight (down)")
    expert_w3: str | Auto | None = key(
        "auto", "name of an expert's third weight (up); null: gate and up are one weight; auto: by preset"
    )
    num_experts_attr: str | None = key(None, "attribute of the model's config: number of experts")
    top_k_attr: str | None = key(None, "attribute of the model's config: experts for each token")
    has_shared_experts: bool | None = key(None, "some experts compute every token; null: by preset")
    shared_experts_pattern: str | None = key(None, "attribute that holds the shared experts")
    shared_experts_gate_pattern: str | None = key(None, "attribute that holds the gate of the shared experts")
    score_func: Literal["auto", "softmax", "sigmoid"] = key("auto", "function from the router's output to scores")
    score_apply: Literal["auto", "pre", "post"] = key("auto", "weight tokens before or after the experts")
    route_norm: bool | None = key(None, "scale the chosen scores to a sum of 1; null: by preset")
    route_scale: float = key(1.0, "factor on the scores", allow_inf_nan=False)
    routed_scaling_factor: float | Auto = key("auto", "factor on the experts' output; auto: the model's own")
    top_k: int | Auto = key("auto", "experts for each token; auto: the model's own")
    num_expert_groups: int | None = key(None, "groups of experts that the router chooses among", ge=1)
    num_limited_groups: int | None = key(None, "groups of experts that one token may use", ge=1)
    load_balance_coeff: float | None = key(
        None, "step of the bias that balances the load without a loss; null: none", ge=0, allow_inf_nan=False
    )
    overlap: int = key(
        1, "chunks of the tokens: one is communicated while another is computed; 1: none (Shoal's own key)", ge=1
    )
    ranks_per_node: Degree = key(
        "auto",
        "expert-parallel ranks of one node: on several nodes, rows are sent within a node first, then once between"
        " nodes; auto: by host name (Shoal's own key)",
    )
    rebalance_every: int = key(
        0, "steps between two moves of experts among ranks, by measured load; 0: never (Shoal's own key)", ge=0
    )
    hot_experts: int = key(
        0,
        "experts of each layer, the most loaded ones, that every rank may have a copy of; chosen each"
        " `rebalance_every` steps (Shoal's own key)",
        ge=0,
    )
    gather_if_used: bool = key(
        False,
        "with `offload_param`: read and gather only experts that some token uses (Shoal's own key)",
    )


def expert_problems(experts: ExpertParallel) -> Iterator[Problem]:
    """What the keys of the section allow one by one, and not together."""
    if experts.preset_model is not None and experts.preset_model not in PRESETS:
        what = f'"{experts.preset_model}" is not a preset{did_you_mean(experts.preset_model, PRESETS) or "."}'
        do = f"write one of {', '.join(PRESETS)}, or leave it out and name the layers by patterns."
        yield Problem("expert_parallel.preset_model", what, do)
    for name in ("moe_layer_pattern", "router_pattern", "expert_pattern", "shared_experts_pattern"):
        pattern = getattr(experts, name)
        try:
            re.compile(pattern or "")
        except re.error as error:
            what = f'"{pattern}" is not a regular expression: {error}.'
            yield Problem(f"expert_parallel.{name}", what, "correct the expression.")
    if experts.gather_if_used and experts.hot_experts:
        what = f"true, and hot_experts is {experts.hot_experts}: copies are made of experts that are gathered."
        yield Problem("expert_parallel.gather_if_used", what, "leave out one of the two.")
    groups, limited = experts.num_expert_groups, experts.num_limited_groups
    if (groups is None) != (limited is None) or (groups is not None and limited is not None and limited > groups):
        what = f"{groups}, and num_limited_groups is {limited}: a token uses some of the groups."
        do = "set both, with at most as many limited groups as groups, or neither."
        yield Problem("expert_parallel.num_expert_groups", what, do)
    if experts.has_shared_experts and not (experts.shared_experts_pattern or experts.preset_model):
        what = "true, and neither shared_experts_pattern nor preset_model names them."
        yield Problem("expert_parallel.has_shared_experts", what, "name the attribute in shared_experts_pattern.")
