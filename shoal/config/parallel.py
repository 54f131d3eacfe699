"""How ranks are divided among the axes of the mesh, and how layers are split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from shoal.config.base import Auto, Section, key, section
from shoal.config.tables import with_unsupported

Degree = Annotated[int, Field(ge=1)] | Auto


class Parallel(Section):
    """The mesh: how many ranks along each axis. Shoal's own."""

    pp: Degree = key("auto", "pipeline stages")
    dp_replicate: Degree = key("auto", "groups of ranks that each store all shards")
    dp_shard: Degree = key("auto", "ranks of one group, over which state is sharded")
    cp: Degree = key("auto", "context-parallel ranks: parts of a sequence, with ring attention")
    sp: Degree = key("auto", "sequence-parallel ranks: parts of a sequence, with Ulysses' all-to-all over heads")
    tp: Degree = key("auto", "tensor-parallel ranks: parts of each layer")
    ep: Degree = key("auto", "expert-parallel ranks")
    tp_plan: dict[str, str] | Auto = key(
        "auto", "how modules are split, by name with wildcards (`column`, `row` ...); auto: the model's own plan"
    )
    tp_grid: Literal["1d", "2d", "2.5d", "3d"] = key(
        "1d",
        "how layers are split over the tensor-parallel ranks: along one dim (1d), or over a grid of q x q (2d), "
        "q x q x d (2.5d) or q x q x q ranks (3d)",
    )
    tp_sequence_parallel: bool = key(
        False, "between split layers, each tensor-parallel rank holds a part of the sequence (Megatron's)"
    )
    tp_loss_parallel: bool = key(
        False, "compute the loss from split logits, which no rank holds whole; the model returns this rank's part"
    )


class LayerRule(Section):
    """A rule for the layers whose names match."""

    patterns: tuple[str, ...] = key((), "regular expressions over parameter names")
    partition_type: Literal["row", "column", "skip"] = key("column", "split the rows, the columns, or nothing")
    shape: tuple[Any, ...] | None = key(None, "the parts of a fused weight (query, key and value; gate and up)")
    partition_dim: int | None = key(None, "the dimension of `shape` that is split")
    model_types: tuple[str, ...] | None = key(None, "Hugging Face model types for which the rule holds; null: all")
    gather_output: bool = key(False, "gather the output of a column split")
    grad_allreduce: bool = key(False, "sum the gradient of a parameter that every rank holds")


class PartitionConfig(Section):
    """Rules for splitting layers."""

    use_default_specs: bool = key(True, "also use the built-in rules")
    layer_specs: tuple[LayerRule, ...] = key((), "the rules")
    strict_mode: bool = key(True, "raise an error for a linear layer that no rule matches")


@with_unsupported("tensor_parallel.tp")
class TpDegree(Section):
    """The same degree, as in DeepSpeed's inference config."""

    tp_size: int = key(1, "tensor-parallel ranks", ge=1)


@with_unsupported("tensor_parallel")
class TensorParallel(Section):
    """Layers split over ranks (AutoTP)."""

    autotp_size: int = key(0, "tensor-parallel ranks; 0 is off", ge=0)
    tp_overlap_comm: bool = key(False, "overlap sums over ranks with computation")
    partition_config: PartitionConfig | None = key(None, "rules for splitting layers")
    tp: TpDegree = section(TpDegree, "the same degree, as in the inference config")
