"""``compression_training`` and the quantizers beside it: smaller models by training."""

from __future__ import annotations

from typing import Any

from shoal.config.base import Section, key, section


class LayerReduction(Section):
    """A student with some of the teacher's layers."""

    enabled: bool = key(False, "train a student")
    keep_number_layer: int | None = key(None, "layers of the student")
    module_name_prefix: str | None = key(None, "name before the layer's number")
    teacher_layer: tuple[int, ...] | None = key(None, "which layers of the teacher")
    other_module_name: tuple[str, ...] | None = key(None, "modules copied as they are")


class MixedQuantize(Section):
    """fp16 and quantized weights mixed."""

    enabled: bool = key(False, "mix them")
    quantize_change_ratio: float = key(0.001, "change of the mixture at each step")


class WeightQuantizationShared(Section):
    """Settings of all groups."""

    enabled: bool = key(False, "train with quantized weights")
    quantizer_kernel: bool = key(False, "a compiled quantizer")
    schedule_offset: int = key(0, "step at which it begins")
    quantize_groups: int = key(1, "groups with a scale of their own")
    quantize_verbose: bool = key(False, "print")
    quantization_type: str = key("symmetric", "symmetric or asymmetric")
    rounding: str = key("nearest", "nearest or stochastic")
    quantize_weight_in_forward: bool = key(False, "quantize in the forward pass")
    fp16_mixed_quantize: MixedQuantize = section(MixedQuantize, "fp16 and quantized weights mixed")


class WeightBits(Section):
    """Bits of a group's weights."""

    start_bits: int | None = key(None, "bits at the start")
    target_bits: int | None = key(None, "bits at the end")
    quantization_period: int = key(1, "steps between two reductions")


class ActivationBits(Section):
    """Bits of a group's activations."""

    bits: int | None = key(None, "bits")


class DenseRatio(Section):
    """Share of a group that stays."""

    dense_ratio: float | None = key(None, "share that stays")


class Group(Section):
    """Modules with settings of their own."""

    modules: tuple[str, ...] | str = key("*", "names of modules")
    related_modules: tuple[Any, ...] | str | None = key(None, "modules that change with them")


class WeightGroup(Group):
    """Modules whose weights are quantized alike."""

    params: WeightBits = section(WeightBits, "bits of the weights")


class ActivationGroup(Group):
    """Modules whose activations are quantized alike."""

    params: ActivationBits = section(ActivationBits, "bits of the activations")


class PruningGroup(Group):
    """Modules that are pruned alike."""

    params: DenseRatio = section(DenseRatio, "share that stays")


class WeightQuantization(Section):
    """Quantized weights."""

    shared_parameters: WeightQuantizationShared = section(WeightQuantizationShared, "settings of all groups")
    different_groups: dict[str, WeightGroup] = key({}, "groups of modules, by name")


class ActivationQuantizationShared(Section):
    """Settings of all groups."""

    enabled: bool = key(False, "train with quantized activations")
    quantization_type: str = key("symmetric", "symmetric or asymmetric")
    range_calibration: str = key("dynamic", "dynamic or static")
    schedule_offset: int = key(1000, "step at which it begins")


class ActivationQuantization(Section):
    """Quantized activations."""

    shared_parameters: ActivationQuantizationShared = section(ActivationQuantizationShared, "settings of all groups")
    different_groups: dict[str, ActivationGroup] = key({}, "groups of modules, by name")


class PruningShared(Section):
    """Settings of all groups."""

    enabled: bool = key(False, "prune")
    method: str = key("l1", "how what goes is chosen: l1 or topk")
    schedule_offset: int = key(1000, "step at which it begins")


class SparsePruningShared(PruningShared):
    """Settings of all groups, for single weights."""

    schedule_offset_end: int | None = key(None, "step at which it ends; null: at the offset")
    schedule_offset_stride: int = key(1, "steps between two prunings")
    block_pattern: str = key("4x1", "blocks that go together")
    dense_ratio: float = key(0.1, "share that stays")
    excluded_modules: tuple[str, ...] = key((), "modules left alone")


class HeadPruningShared(PruningShared):
    """Settings of all groups, for attention heads."""

    method: str = key("topk", "how what goes is chosen")
    num_heads: int | None = key(None, "heads of a layer")


class SparsePruning(Section):
    """Single weights go."""

    shared_parameters: SparsePruningShared = section(SparsePruningShared, "settings of all groups")
    different_groups: dict[str, PruningGroup] = key({}, "groups of modules, by name")


class Pruning(Section):
    """Rows or channels go."""

    shared_parameters: PruningShared = section(PruningShared, "settings of all groups")
    different_groups: dict[str, PruningGroup] = key({}, "groups of modules, by name")


class HeadPruning(Section):
    """Attention heads go."""

    shared_parameters: HeadPruningShared = section(HeadPruningShared, "settings of all groups")
    different_groups: dict[str, PruningGroup] = key({}, "groups of modules, by name")


class CompressionTraining(Section):
    """Smaller models by training."""

    layer_reduction: LayerReduction = section(LayerReduction, "a student with some of the teacher's layers")
    weight_quantization: WeightQuantization = section(WeightQuantization, "quantized weights")
    activation_quantization: ActivationQuantization = section(ActivationQuantization, "quantized activations")
    sparse_pruning: SparsePruning = section(SparsePruning, "single weights go")
    row_pruning: Pruning = section(Pruning, "rows go")
    channel_pruning: Pruning = section(Pruning, "channels go")
    head_pruning: HeadPruning = section(HeadPruning, "attention heads go")


class InitQuantization(Section):
    """Quantized weights from the start, for inference."""

    enabled: bool = key(True, "quantize")
    num_bits: int = key(8, "bits")
    q_type: str = key("symmetric", "symmetric or asymmetric")
    q_groups: int = key(1, "groups with a scale of their own")
    quantized_initialization: dict[str, Any] = key({}, "settings while loading")
    post_init_quant: dict[str, Any] = key({}, "settings after loading")
