"""``checkpoint``, ``aio``, ``activation_checkpointing``, and the checkpoint services that DeepSpeed knows."""

from __future__ import annotations

from typing import Any, Literal

from shoal.config.base import Section, key
from shoal.config.unsupported import with_unsupported


@with_unsupported("checkpoint")
class Checkpoint(Section):
    """Saving and loading."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] = key("Warn", "what ranks with different tags do")
    load_universal: bool = key(
        False, "load_checkpoint without a tag loads what latest_universal names, if that file is there"
    )
    async_save: bool = key(False, "write during training (Shoal's own key)", alias=("async",))
    keep_last: int = key(0, "checkpoints kept; 0: all (Shoal's own key)", ge=0)
    keep_every: int = key(0, "keep each checkpoint whose step divides by this; 0: none (Shoal's own key)", ge=0)
    on_save_error: Literal["raise", "warn"] = key("raise", "what training does after a failed save (Shoal's own key)")
    verify: bool = key(True, "compare checksums when loading (Shoal's own key)")
    module_in_model_file: bool = key(
        True,
        "under DeepSpeed's name, below stage 3: the weights in mp_rank_00_model_states.pt too, for scripts that read"
        " them there (Shoal's own key)",
    )


@with_unsupported("aio")
class Aio(Section):
    """How the disk is read and written when state is offloaded to it."""

    block_size: int = key(1_048_576, "bytes of one request", ge=1)
    queue_depth: int = key(8, "requests in flight", ge=1)
    intra_op_parallelism: int = key(
        1, "threads that read and write; two at the least, so that both go on at once", alias=("thread_count",), ge=1
    )


@with_unsupported("activation_checkpointing")
class ActivationCheckpointing(Section):
    """Which activations are recomputed in the backward pass instead of being saved."""

    partition_activations: bool = key(False, "split saved activations over tensor-parallel ranks")
    cpu_checkpointing: bool = key(False, "store saved activations in host memory")
    contiguous_memory_optimization: bool = key(False, "store saved activations in one buffer")
    number_checkpoints: int | None = key(None, "number of checkpoints in this buffer")
    synchronize_checkpoint_boundary: bool = key(False, "wait for the device at each checkpoint")
    profile: bool = key(False, "time each recomputed function")
    modules: tuple[str, ...] | None = key(None, "modules to recompute (Shoal's own key)")
    policy: Any = key(None, "what a recomputed module saves: block, or single operations (Shoal's own key)")
