"""``compile``: torch.compile, and the graph passes of DeepSpeed's DeepCompile."""

from __future__ import annotations

from shoal.config.base import Section, key


class Compile(Section):
    """Compilation of the model."""

    deepcompile: bool = key(False, "ZeRO as passes over the compiled graph")
    passes: tuple[str, ...] | None = key(None, "which passes: z1, z3, autosp, autotp")
    autoep_non_moe: bool = key(False, "compile what is around a mixture's layers, which stay as they are")
    free_activation: bool = key(False, "free large activations early")
    free_activation_threshold: int = key(10 * 1024**2, "bytes from which an activation is large", ge=0)
    offload_activation: bool = key(False, "move saved tensors to host memory")
    offload_activation_pin_memory: bool = key(True, "page-lock that memory")
    offload_opt_states: bool = key(False, "move optimizer state to host memory in the graph")
    offload_parameters: bool = key(False, "move parameters to host memory in the graph")
    double_buffer: bool = key(True, "two buffers for gathered parameters")
    symmetric_memory: bool = key(False, "collectives over symmetric memory")
    debug_log: bool = key(False, "write the graphs to files")
    sync_before_reduce: bool = key(False, "wait for the device before each reduction")
    sync_after_reduce: bool = key(False, "wait for the device after each reduction")
    sync_before_allgather: bool = key(False, "wait for the device before each all-gather")
    sync_after_allgather: bool = key(False, "wait for the device after each all-gather")
    keep_int_input_tensors: bool = key(True, "keep integer inputs for profiling")
    keep_all_input_tensors: bool = key(False, "keep all inputs for profiling")
    enabled: bool = key(False, "compile the model's blocks (Shoal's own key)")
    mode: str = key("default", "torch.compile's mode (Shoal's own key)")
    regional: bool = key(True, "compile each block once instead of the whole model (Shoal's own key)")
