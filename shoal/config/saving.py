"""``checkpoint``, ``aio``, ``activation_checkpointing``, and the checkpoint services that DeepSpeed knows."""

from __future__ import annotations

from typing import Any, Literal

from shoal.config.base import Section, key, section


class ParallelWrite(Section):
    """Who writes at the same time."""

    pipeline_stage: bool = key(False, "pipeline stages write at the same time")


class Writer(Section):
    """How the bytes reach the disk."""

    type: str = key("FAST", "MOCK, PYTHON or FAST")
    decoupled: bool = key(False, "write in another process while training goes on")
    io_buffer_size: int = key(64 * 1024**2, "bytes of the writer's buffer", ge=1)
    io_buffer_double: bool = key(True, "two such buffers")
    io_multiplier: int = key(1, "factor on the number of writers", ge=1)
    data_parallel: str | None = key(None, "spread the writing over REPLICA, SOCKET or MACHINE")
    show_statistics: bool = key(False, "print the speed of writing")


class Checkpoint(Section):
    """Saving and loading."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] = key("Warn", "what ranks with different tags do")
    load_universal: bool = key(
        False, "load_checkpoint without a tag loads what latest_universal names, if that file is there"
    )
    use_node_local_storage: bool = key(False, "each node writes to a folder of its own")
    parallel_write: ParallelWrite = section(ParallelWrite, "who writes at the same time")
    checkpoint_serialization: bool = key(True, "torch.save's zip format")
    writer: Writer | None = key(None, "how the bytes reach the disk")
    async_save: bool = key(False, "write while training goes on (Shoal's own key)", alias=("async",))
    keep_last: int = key(0, "checkpoints kept; 0: all (Shoal's own key)", ge=0)
    keep_every: int = key(0, "keep each checkpoint whose step divides by this; 0: none (Shoal's own key)", ge=0)
    on_save_error: Literal["raise", "warn"] = key("raise", "what a save that fails does to training (Shoal's own key)")
    verify: bool = key(True, "check sums when loading (Shoal's own key)")
    module_in_model_file: bool = key(
        True,
        "under DeepSpeed's name, below stage 3: the weights in mp_rank_00_model_states.pt too, for scripts that read"
        " them there (Shoal's own key)",
    )
    save_on_signal: bool = key(False, "save when the job is told to stop (Shoal's own key)")


class Aio(Section):
    """How the disk is read and written when state is offloaded to it."""

    block_size: int = key(1_048_576, "bytes of one request", ge=1)
    queue_depth: int = key(8, "requests in flight", ge=1)
    intra_op_parallelism: int = key(
        1, "threads that read and write; two at the least, so that both go on at once", alias=("thread_count",), ge=1
    )
    single_submit: bool = key(False, "submit requests one by one")
    overlap_events: bool = key(True, "submit new requests while others finish")
    use_gds: bool = key(False, "move between disk and GPU without the host (GPUDirect Storage)")


class ActivationCheckpointing(Section):
    """Which activations are computed again in the backward pass instead of being kept."""

    partition_activations: bool = key(False, "split saved activations over tensor-parallel ranks")
    cpu_checkpointing: bool = key(False, "keep saved activations in host memory")
    contiguous_memory_optimization: bool = key(False, "keep saved activations in one buffer")
    number_checkpoints: int | None = key(None, "checkpoints that this buffer holds")
    synchronize_checkpoint_boundary: bool = key(False, "wait for the device at each checkpoint")
    profile: bool = key(False, "time each recomputed function")
    modules: tuple[str, ...] | None = key(None, "modules to recompute (Shoal's own key)")
    policy: Any = key(None, "what a recomputed module keeps: block, or single operations (Shoal's own key)")
    memory_budget: int | str | None = key(None, "bytes of activations allowed (Shoal's own key)")
