"""``tensor_parallel``, ``expert_parallel`` and ``pipeline``: how one model is cut into parts."""

from __future__ import annotations

from typing import Any, Literal

from shoal.config.base import Auto, Section, key, section


class LayerSpec(Section):
    """A rule: which parameters, and how they are split."""

    patterns: tuple[str, ...] = key((), "regular expressions over parameter names")
    partition_type: Literal["row", "column", "skip"] = key("column", "split the rows, the columns, or nothing")
    shape: tuple[Any, ...] | None = key(None, "the parts of a fused weight (query, key and value; gate and up)")
    partition_dim: int | None = key(None, "the dimension of `shape` that is split")
    model_types: tuple[str, ...] | None = key(None, "Hugging Face model types for which the rule holds; null: all")
    gather_output: bool = key(False, "gather the output of a column split")
    grad_allreduce: bool = key(False, "sum the gradient of a parameter that every rank holds")


class PartitionConfig(Section):
    """Rules for splitting layers."""

    use_default_specs: bool = key(True, "keep the built-in rules beside these")
    layer_specs: tuple[LayerSpec, ...] = key((), "the rules")
    strict_mode: bool = key(False, "a linear layer that no rule names is an error")


class Tp(Section):
    """The same degree, as the inference config says it."""

    tp_size: int = key(1, "tensor-parallel ranks", ge=1)
    tp_grain_size: int = key(1, "sizes of shards are multiples of this", ge=1)
    mpu: Any = key(None, "an object that knows the ranks' groups")
    tp_group: Any = key(None, "a process group")


class TensorParallel(Section):
    """Layers split over ranks."""

    autotp_size: int = key(0, "tensor-parallel ranks; 0 is off", ge=0)
    preset_model: str | None = key(None, "rules of a model family: llama, mixtral, qwen2, phi3 ...")
    vocab_parallel_lm_head: bool | None = key(None, "split the output layer by vocabulary; null: by the model's plan")
    vocab_parallel_ce_backend: str = key("torch", "kernel of the cross entropy over a split vocabulary: torch or liger")
    tp_overlap_comm: bool = key(False, "sum over ranks while computing")
    partition_config: PartitionConfig | None = key(None, "rules for splitting layers")
    dtype: str | None = key(None, "the model's format; left over from inference")
    tp: Tp = section(Tp, "the same degree, as the inference config says it")
    injection_policy_tuple: Any = key(None, "inference only: modules to replace")
    keep_module_on_host: bool = key(False, "inference only: shard in host memory")
    replace_with_kernel_inject: bool = key(False, "inference only: fused kernels")


class ExpertParallel(Section):
    """Experts spread over ranks."""

    enabled: bool = key(False, "replace mixture-of-experts blocks by ones whose experts are spread over ranks")
    autoep_size: int = key(1, "expert-parallel ranks", ge=1)
    expert_tensor_parallel_size: int = key(1, "ranks over which one expert is split", ge=1)
    preset_model: str | None = key(None, "rules of a model family: mixtral, qwen3_moe, deepseek_v3 ...")
    use_grouped_mm: bool = key(True, "compute all experts in one grouped product")
    disable_triton_grouped_mm: bool = key(False, "never use the Triton kernel for that")
    moe_layer_pattern: str | None = key(None, "regular expression: which modules are mixtures of experts")
    router_pattern: str | None = key(None, "attribute that holds the router")
    expert_pattern: str | None = key(None, "attribute that holds the experts")
    expert_w1: str | None = key(None, "name of an expert's first weight")
    expert_w2: str | None = key(None, "name of an expert's second weight")
    expert_w3: str | None = key(None, "name of an expert's third weight; null: gate and up are one weight")
    num_experts_attr: str | None = key(None, "attribute of the model's config: number of experts")
    top_k_attr: str | None = key(None, "attribute of the model's config: experts for each token")
    has_shared_experts: bool | None = key(None, "some experts see every token")
    shared_experts_pattern: str | None = key(None, "attribute that holds them")
    shared_experts_gate_pattern: str | None = key(None, "attribute that holds their gate")
    score_func: Literal["auto", "softmax", "sigmoid"] = key("auto", "what turns the router's output into scores")
    score_apply: Literal["auto", "pre", "post"] = key("auto", "weight tokens before or after the experts")
    route_norm: bool | None = key(None, "scale the chosen scores to a sum of 1")
    route_scale: float = key(1.0, "factor on the scores")
    routed_scaling_factor: float | Auto = key("auto", "factor on the experts' output")
    top_k: int | Auto = key("auto", "experts for each token")
    num_expert_groups: int | None = key(None, "groups of experts that the router chooses among")
    num_limited_groups: int | None = key(None, "groups that one token may use")
    load_balance_coeff: float | None = key(None, "step of the bias that balances the load without a loss")
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm"] = key("auto", "how outputs of experts are added up")
    validate_folding_routing: bool = key(False, "check the routing")


class Pipeline(Section):
    """Layers spread over stages."""

    stages: int | Auto = key("auto", "pipeline stages")
    partition: str = key("best", "how layers are divided: best, uniform, parameters, or type:REGEX")
    seed_layers: bool = key(False, "give each layer a seed of its own")
    activation_checkpoint_interval: int = key(0, "recompute activations every so many layers; 0 never", ge=0)
    pipe_partitioned: bool = key(True, "send activations in tensor-parallel parts")
    grad_partitioned: bool = key(True, "send gradients in tensor-parallel parts")
    use_reentrant: bool | None = key(None, "reentrant activation checkpointing; null is true in DeepSpeed, false here")
    schedule: str = key("1f1b", "order of the micro-batches' work (Shoal's own key)")
    virtual_stages: int = key(1, "stages that one rank holds (Shoal's own key)", ge=1)
    split_points: tuple[str, ...] | Auto = key("auto", "modules that begin a stage (Shoal's own key)")
