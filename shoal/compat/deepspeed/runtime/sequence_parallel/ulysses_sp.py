"""``deepspeed.runtime.sequence_parallel.ulysses_sp``: sequence parallelism; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_class, absent_function

_DO = (
    "sequence parallelism is not built yet: use activation checkpointing for long sequences, or a smaller micro-batch."
)

UlyssesSPAttentionHF = absent_class("deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF", _DO)
UlyssesSPDataLoaderAdapter = absent_class(
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter", _DO
)
SequenceTiledCompute = absent_class("deepspeed.runtime.sequence_parallel.ulysses_sp.SequenceTiledCompute", _DO)
TiledMLP = absent_class("deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP", _DO)
TiledFusedLogitsLoss = absent_class("deepspeed.runtime.sequence_parallel.ulysses_sp.TiledFusedLogitsLoss", _DO)
sequence_tiled_compute = absent_function("deepspeed.runtime.sequence_parallel.ulysses_sp.sequence_tiled_compute", _DO)

__all__ = [
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]
