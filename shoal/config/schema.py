"""The whole file as one model: every key of DeepSpeed's schema and Shoal's own.

Here are the sections of precision, saving, disk, recomputation, monitors, curriculum and elasticity, and Shoal's small
ones; those of sharding, parallelism and the optimizer have modules of their own.
"""

from __future__ import annotations

from typing import Any, Literal

from shoal.config.autotuning import Autotuning
from shoal.config.base import Auto, Dtype, Section, key, section
from shoal.config.data_efficiency import DataEfficiency
from shoal.config.optimizer import Optimizer, Scheduler
from shoal.config.parallel import ExpertParallel, Parallel, Pipeline, TensorParallel
from shoal.config.schedule import ScheduleConfig
from shoal.config.tables import with_unsupported
from shoal.config.zero import LocalStepsSection, WireSection, ZeroOptimization

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4"]


class Fp16(Section):
    """Half precision with fp32 main parameters and a loss scale."""

    enabled: bool = key(False, "16-bit (fp16) weights and gradients, fp32 main parameters, scaled loss")
    auto_cast: bool = key(False, "cast floating-point inputs of the model to fp16")
    loss_scale: float = key(0.0, "a fixed loss scale; 0: dynamic", ge=0, allow_inf_nan=False)
    initial_scale_power: int = key(16, "the dynamic loss scale starts at 2 to this power, 0 to 127")
    loss_scale_window: int = key(1000, "steps without overflow before the scale doubles, at least 1")
    hysteresis: int = key(2, "overflows tolerated before the scale is halved, at least 1")
    consecutive_hysteresis: bool = key(False, "a step without overflow restores the tolerated overflows")
    min_loss_scale: float = key(1.0, "lowest loss scale, above 0", allow_inf_nan=False)
    fp16_master_weights_and_grads: bool = key(False, "no fp32 main parameters: the optimizer updates fp16")


@with_unsupported("bf16")
class Bf16(Section):
    """bfloat16 with fp32 main parameters."""

    enabled: bool = key(False, "bfloat16 weights and gradients, fp32 main parameters")
    check_grad_overflow: bool = key(True, "check gradients for infinity and NaN before the step")
    bf16_master_weights_and_grads: bool = key(False, "no fp32 main parameters: the optimizer updates bfloat16")
    bf16_optimizer_states: bool = key(
        False, "optimizer state in bfloat16 too, else fp32; needs bf16_master_weights_and_grads"
    )


class TorchAutocast(Section):
    """`torch.autocast` around the forward pass."""

    enabled: bool = key(False, "run the forward pass under torch.autocast")
    dtype: Dtype | None = key(None, "autocast's dtype; null is bf16")
    lower_precision_safe_modules: tuple[str, ...] | None = key(
        None,
        "classes whose gradients are reduced, and at stage 3 parameters gathered, in autocast's dtype; null: none "
        "(DeepSpeed: Linear, Conv1d to 3d)",
    )


class Fp8(Section):
    """Shoal's own: linear layers whose products, forward and backward, are computed in 8 or 4 bits."""

    recipe: Recipe | None = key(
        None, "formats and scales of the operands; null: all layers compute in the parameters' dtype"
    )
    modules: tuple[str, ...] | None = key(
        None,
        "names of linear layers that compute so, `*` matches any text; null: those whose dims are multiples of 16,"
        " without the head",
    )
    keep: tuple[str, ...] = key((), "names of layers that stay as they are, of those of `modules`")
    keep_last_layers: float = key(0.0, "share of the blocks, the last ones, that stay as they are", ge=0, lt=1)
    from_step: int = key(0, "steps that are done before the layers compute so", ge=0)
    until_step: int | None = key(None, "steps after which they compute as they are again; null: never", ge=1)


class DataTypes(Section):
    """Dtypes of single kinds of state."""

    grad_accum_dtype: Dtype | None = key(
        None,
        "dtype in which gradients of several micro-batches are summed; null is fp32 where there are fp32 main"
        " parameters and more than one micro-batch, else the parameters' dtype (DeepSpeed: always the latter)",
    )
    param_dtype: Dtype | None = key(None, "dtype of the parameters; must agree with fp16 and bf16")
    buffer_dtype: Dtype | None = key(
        None, "dtype of the model's floating-point buffers; null: unchanged (a batch norm's: that of the parameters)"
    )
    keep_in_fp32_modules: tuple[str, ...] | Auto = key(
        "auto",
        "names of buffers that stay in fp32 with 16-bit parameters, `*` matches any text; auto: those that the model"
        " names in `_keep_in_fp32_modules_strict` (under fp16 also in `_keep_in_fp32_modules`)",
    )


class PrecisionSection(Section):
    """Shoal's own: dtypes of communication and state, and the handling of numbers that are not finite."""

    reduce_dtype: Dtype | None = key(None, "dtype in which gradients are reduced; communication_data_type has priority")
    nonfinite: Literal["raise", "skip", "warn"] | None = key(
        None,
        "at a NaN or infinite loss or gradient: raise, skip the step, or warn and continue; null: by precision",
    )
    master_dtype: Dtype | None = key(
        None,
        "dtype of main parameters: fp32, or that of the parameters, which the optimizer then updates directly;"
        " null: as fp16 and bf16 say",
    )
    state_dtype: Literal["fp32", "fp16", "bf16", "fp8", "int8"] | None = key(
        None,
        "format of optimizer state: fp32, bf16, or fp8 or int8 in blocks of 256 that share a scale; null: fp32, or as"
        " bf16.bf16_optimizer_states says. A step computes in fp32",
    )
    cast_forward_inputs: bool | None = key(
        None, "cast floating-point inputs of the model to the parameters' 16-bit dtype; null: as fp16.auto_cast says"
    )
    output_dtype: Dtype | None = key(
        None, "floating-point tensors that the model's forward returns are cast to it; null: as the model returns them"
    )
    stochastic_rounding: bool = key(
        False,
        "round bf16 main parameters up or down at random after a step, so that small updates count; needs bf16 with"
        " bf16_master_weights_and_grads, or master_dtype bf16",
    )


@with_unsupported("checkpoint")
class Checkpoint(Section):
    """Saving and loading."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] = key(
        "Warn", "if ranks save under different tags: ignore, warn or fail"
    )
    load_universal: bool = key(
        False, "load_checkpoint without a tag loads the checkpoint that latest_universal names, if that file exists"
    )
    async_save: bool = key(False, "write while training continues (Shoal's own key)", alias=("async",))
    keep_last: int = key(0, "number of newest checkpoints to keep; 0: all (Shoal's own key)", ge=0)
    keep_every: int = key(0, "also keep checkpoints whose step is a multiple of this; 0: none (Shoal's own key)", ge=0)
    on_save_error: Literal["raise", "warn"] = key(
        "raise", "after a failed save: raise the error, or warn and continue (Shoal's own key)"
    )
    save_on_signal: bool = key(
        False,
        "after SIGTERM or SIGUSR1 on any rank: finish the step, save to the folder of the last save or load, and only"
        " then handle the signal (Shoal's own key)",
    )
    verify: bool = key(True, "compare checksums when loading (Shoal's own key)")
    module_in_model_file: bool = key(
        True,
        "under `import deepspeed`, below stage 3: also write weights to mp_rank_00_model_states.pt, for scripts that"
        " read them there (Shoal's own key)",
    )


@with_unsupported("aio")
class Aio(Section):
    """How the disk is read and written when state is offloaded to it."""

    block_size: int = key(1_048_576, "bytes of one request", ge=1)
    queue_depth: int = key(8, "requests in flight", ge=1)
    intra_op_parallelism: int = key(
        1,
        "threads that read and write; at least two are used, so that reads and writes overlap",
        alias=("thread_count",),
        ge=1,
    )


class ActivationCheckpointing(Section):
    """Which activations are recomputed in the backward pass instead of being saved."""

    partition_activations: bool = key(False, "split saved activations over tensor-parallel ranks")
    cpu_checkpointing: bool = key(False, "store saved activations in host memory")
    contiguous_memory_optimization: bool = key(False, "store saved activations in one buffer")
    number_checkpoints: int | None = key(None, "number of checkpoints in this buffer")
    synchronize_checkpoint_boundary: bool = key(False, "wait for the device at each checkpoint")
    profile: bool = key(False, "log the times of each recomputed function, each step or as steps_per_print says")
    modules: tuple[str, ...] | None = key(None, "modules to recompute (Shoal's own key)")
    memory_budget: int | str | None = key(
        None,
        "bytes ('4GiB') for the activations of the blocks on a rank: as few blocks as possible are recomputed to"
        " stay within it, as measured in the first step (Shoal's own key)",
    )
    offload_every: int = key(
        0,
        "of the blocks that memory_budget does not let keep their activations, the first of each so many has them"
        " copied to host memory and is not recomputed; 0: all are recomputed (Shoal's own key)",
        ge=0,
    )
    policy: Any = key(None, "what a recomputed module saves: block, matmul, or a list of operations (Shoal's own key)")


@with_unsupported("compile")
class Compile(Section):
    """Compilation of the model by `torch.compile`."""

    enabled: bool = key(False, "compile the model when it is first run (Shoal's own key)")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = key(
        "default", "torch.compile's mode; `reduce-overhead` and `max-autotune` have CUDA graphs (Shoal's own key)"
    )
    regional: bool = key(
        True,
        "compile the blocks, which share their graphs, instead of the whole model; a model without a list of equal"
        " blocks is compiled whole (Shoal's own key)",
    )
    deepcompile: bool = key(
        False, "compile the blocks (enabled), which run in the recorded order of ZeRO's gathers and reductions"
    )
    offload_activation: bool = key(False, "with deepcompile: `offload_activation.device` is cpu")
    offload_opt_states: bool = key(
        False, "with deepcompile: `zero_optimization.offload_optimizer.device` is cpu, where the update is computed too"
    )
    offload_parameters: bool = key(False, "with deepcompile: `zero_optimization.offload_param.device` is cpu")


class Tensorboard(Section):
    """TensorBoard's event files."""

    enabled: bool = key(False, "write event files")
    output_path: str = key("", "folder; empty: a folder of the run")
    job_name: str = key("DeepSpeedJobName", "folder inside it")


class CsvMonitor(Section):
    """CSV files."""

    enabled: bool = key(False, "write CSV files")
    output_path: str = key("", "folder; empty: a folder of the run")
    job_name: str = key("DeepSpeedJobName", "folder inside it")


class PrometheusSection(Section):
    """Values that a Prometheus server fetches from rank 0."""

    enabled: bool = key(False, "serve the last values at http://address:port/metrics")
    address: str = key("127.0.0.1", "interface to listen at; the default is reached from this machine only")
    port: int = key(9400, "port to listen at", ge=1, le=65535)


class GoodputSection(Section):
    """Where the time of a run goes, over all its starts."""

    file: str | None = key(None, "rank 0 appends the seconds of each section to it; `shoal goodput` reads it")
    rank_times_every: int = key(
        50,
        "of one step in so many, every rank's milliseconds by phase are written to `file`, for `shoal report` and"
        " `shoal doctor`; in that step the device is waited for, as with wall_clock_breakdown",
        ge=1,
    )
    slow_rank_factor: float = key(
        1.3, "a rank is slow whose own work takes longer than so many times the median of the others", gt=1
    )
    slow_rank_samples: int = key(3, "measured steps in a row after which a slow rank is named in the log", ge=1)


class Wandb(Section):
    """Weights & Biases."""

    enabled: bool = key(False, "log to Weights & Biases")
    group: str | None = key(None, "group of runs")
    team: str | None = key(None, "team (called entity by Weights & Biases)")
    project: str = key("deepspeed", "project")


class Comet(Section):
    """Comet."""

    enabled: bool = key(False, "log to Comet")
    samples_log_interval: int = key(100, "samples between two entries", ge=1)
    project: str | None = key(None, "project")
    workspace: str | None = key(None, "workspace")
    api_key: str | None = key(None, "the service's key; never printed, logged or saved", secret=True)
    experiment_name: str | None = key(None, "name of the run")
    experiment_key: str | None = key(None, "experiment to resume")
    online: bool | None = key(None, "send immediately, or store locally")
    mode: str | None = key(None, "get, create, or get_or_create")


class MlflowMonitor(Section):
    """MLflow."""

    enabled: bool = key(False, "log to MLflow (Shoal's own section)")
    tracking_uri: str | None = key(None, "server or folder; null: as MLflow's own configuration has it")
    experiment_name: str | None = key(None, "experiment; null: MLflow's choice")
    run_name: str | None = key(None, "name of the run; null: MLflow's choice")


class CommsLogger(Section):
    """Times of collectives."""

    enabled: bool = key(False, "time every collective")
    prof_all: bool = key(True, "time all kinds of collectives")
    prof_ops: tuple[str, ...] = key((), "time only these kinds")
    verbose: bool = key(False, "print each collective")
    debug: bool = key(False, "also print its caller")


class FlopsProfilerSection(Section):
    """Operations of one step, by module."""

    enabled: bool = key(False, "count the operations of one step")
    profile_step: int = key(1, "step to profile", alias=("step",), ge=0)
    module_depth: int = key(-1, "depth of the printed tree; -1: all", ge=-1)
    top_modules: int = key(1, "modules printed at each depth", ge=1)
    detailed: bool = key(True, "print the whole tree")
    output_file: str | None = key(None, "file to print to")
    recompute_fwd_factor: float = key(0.0, "forward passes counted for recomputation", ge=0)


class CurriculumLearning(Section):
    """Short sequences first (the older form)."""

    enabled: bool = key(False, "begin with short sequences")
    curriculum_type: str = key("seqlen", "quantity that grows")
    min_difficulty: int | None = key(None, "length at the start")
    max_difficulty: int | None = key(None, "length at the end")
    schedule_type: str | None = key(None, "fixed_linear, fixed_root, fixed_discrete or custom")
    schedule_config: ScheduleConfig = section(ScheduleConfig, "how the length grows")


class ProgressiveLayerDropSection(Section):
    """Layers that are skipped at random, more of them in later steps."""

    enabled: bool = key(False, "skip layers at random")
    theta: float = key(1.0, "share of layers that run at the end", ge=0, le=1)
    gamma: float = key(0.001, "how fast that share is reached", ge=0)


class Elasticity(Section):
    """A batch size that stays the same while the number of ranks changes."""

    enabled: bool = key(False, "choose a batch size that many numbers of ranks can use")
    max_train_batch_size: int = key(2000, "largest global batch; required", ge=1)
    micro_batch_sizes: tuple[int, ...] = key((2, 4, 6), "micro-batches to choose from; required")
    min_gpus: int = key(1, "smallest number of ranks", ge=1)
    max_gpus: int = key(10000, "largest number of ranks", ge=1)
    min_time: int = key(0, "minutes between two changes", ge=0)
    prefer_larger_batch: bool = key(
        True, "if several batches are equally good, choose the larger one", alias=("prefer_large_batch",)
    )
    ignore_non_elastic_batch_info: bool = key(False, "ignore the batch sizes given elsewhere")
    version: float = key(
        0.2, "0.1 counts ranks; 0.2 counts whole nodes, and chooses another batch for other numbers of ranks"
    )
    num_gpus_per_node: int = key(1, "ranks of a node", ge=1)
    model_parallel_size: int = key(1, "model-parallel ranks of one model", ge=1)


class Units(Section):
    """Modules that are gathered together, by name where the automatic partition does not find them."""

    classes: tuple[str, ...] = key((), "class names of modules that are one unit each")
    names: tuple[str, ...] = key((), "full names of modules that are one unit each")


class OffloadActivation(Section):
    """Saved activations on the host."""

    device: Literal["none", "cpu"] = key("none", "where activations saved for the backward pass are stored")
    bytes: int | None = key(None, "largest number of bytes offloaded in a micro-batch; null: all", ge=0)


@with_unsupported("debug")
class Debug(Section):
    """Checks that cost time."""

    disk_sums: bool = key(
        False, "compute a checksum of each block that is offloaded to a disk, and compare it whenever the block is read"
    )
    collective_check: bool = key(
        False, "compare what the ranks are about to call before each collective and message over NCCL begins"
    )
    check_streams: bool = key(
        False,
        "simulate an accelerator on the CPU from initialize to destroy, and check that its streams wait for each other",
    )
    flight_recorder_folder: str | None = key(
        None, "folder into which each rank writes its last collectives, as JSON, at a failure or a hang; null: none"
    )
    out_of_memory_folder: str | None = key(
        None, "folder into which a rank without memory left writes what uses it, as JSON; null: nothing is written"
    )
    replica_check_steps: int | None = key(
        None, "steps between two comparisons of what several ranks hold alike, bit by bit; null: none", ge=1
    )


class LossSpikeSection(Section):
    """Steps whose loss is far above those before."""

    action: Literal["warn", "skip", "stop", "rewind"] | None = key(
        None,
        "what such a step does: a warning, no update (10 in a row at most), an error, or back to the last checkpoint"
        " without the samples since (3 times in a row at most); null: losses are not judged",
    )
    factor: float = key(6.0, "a spike is a loss above the mean by so many standard deviations", gt=0)
    window: int = key(100, "of the losses of so many steps before", ge=2)


class DeviceCheckSection(Section):
    """Devices that are slow or compute wrong, found by a test of each: a product of matrices, a copy, its links."""

    every: int | None = key(None, "steps between two tests, the first at the start; null: none", ge=1)
    factor: float = key(1.5, "a device is slow that takes longer than so many times the median of the others", gt=1)
    action: Literal["warn", "stop", "exclude"] = key(
        "warn",
        "what a device that is slow or computes wrong does: a warning, an error on every rank, or an error of its rank"
        " after which `shoal run --slurm` goes on without its machine",
    )


class FaultToleranceSection(Section):
    """Replicas that are jobs of their own: one that fails is left out, and joins again."""

    quorum: str | None = key(None, "host:port of `shoal quorum`; null: this job is the whole run")


class Timeouts(Section):
    """Seconds after which a section of a rank is a hang, which is explained and ended; null: never."""

    init: float | None = key(3600.0, "from the start until `initialize` has returned", gt=0)
    data: float | None = key(None, "the script's own work between two steps, such as loading a batch", gt=0)
    compile: float | None = key(3600.0, "forward or backward of the first step of a compiled model", gt=0)
    step: float | None = key(1800.0, "one forward, one backward, or one step of the optimizer", gt=0)
    evaluation: float | None = key(3600.0, "one forward without gradients", gt=0)
    checkpoint: float | None = key(3600.0, "saving or loading a checkpoint", gt=0)


class Data(Section):
    """The loader of ``training_data``."""

    stateful: bool = key(True, "save the loader's position in the data in checkpoints, and load it")
    seed: int | None = key(None, "seed of the order of samples, of a new position; null: the launcher's")
    num_workers: int = key(
        0, "processes of each rank that read samples ahead; a curriculum by measures has its own", ge=0
    )
    read_on_every_stage: bool = key(
        False,
        "the stages between the first and the last of a pipeline read samples too; false: they get what they need from"
        " the index of a `TokenStream`, else from the first stage",
    )


LogLevel = Literal["debug", "info", "warning", "error", "critical"]


@with_unsupported()
class Schema(Section):
    """Every key. The three batch sizes are None until the data-parallel size is known (`Config.with_world_size`)."""

    train_batch_size: int = key(
        None, "samples of one step over all ranks = micro-batch x accumulation steps x data-parallel ranks", ge=1
    )
    train_micro_batch_size_per_gpu: int = key(None, "samples of one micro-batch on one rank", ge=1)
    gradient_accumulation_steps: int = key(None, "micro-batches of one step", ge=1)
    managed_gradient_accumulation: bool = key(
        True, "the engine counts micro-batches and steps at the last; false: each `step()` is a step"
    )
    steps_per_print: int | float | None = key(None, "steps between two progress lines; null or Infinity: none")
    wall_clock_breakdown: bool = key(
        False,
        "time forward, backward, reduce and step: a line a step (with steps_per_print, their means in its line) and the"
        " monitors' elapsed_time events; the device is waited for, so nothing overlaps",
    )
    memory_breakdown: bool = key(
        False, "log memory after forward, backward and step; each step, or as steps_per_print says"
    )
    dump_state: bool = key(False, "log the engine's state at start")
    log_level: LogLevel | None = key(None, "least level that is logged; null: info")
    dataloader_drop_last: bool = key(False, "drop a last batch that is not full")
    zero_allow_untested_optimizer: bool = key(False, "allow any optimizer with ZeRO")
    communication_data_type: Dtype | None = key(None, "format in which gradients are reduced; null: their own")
    gradient_allreduce_op: Literal["mean", "sum"] = key("mean", "how the ranks' gradients are combined")
    loss_reduction: Literal["mean", "token"] = key(
        "mean",
        "'mean': each micro-batch of each rank counts the same; 'token': each token of the step does, and"
        " `engine.backward(loss, num_tokens=n)` says how many a micro-batch has",
    )
    prescale_gradients: bool = key(False, "divide gradients before they are summed, not after")
    gradient_predivide_factor: float = key(
        1.0,
        "divide gradients by this before the sum, and by ranks / this after it; not with prescale_gradients",
        gt=0,
    )
    sparse_gradients: bool = key(False, "exchange only the rows of embeddings' gradients that are not zero")
    gradient_clipping: float = key(1.0, "largest global norm of the gradients; 0: no clipping", ge=0)

    zero_optimization: ZeroOptimization = section(ZeroOptimization, "what is sharded, and in which memory it is stored")
    optimizer: Optimizer | None = key(None, "the optimizer to build, if none is passed to `initialize`")
    scheduler: Scheduler | None = key(None, "the learning-rate schedule to build, if none is passed to `initialize`")
    fp16: Fp16 = section(Fp16, "half precision with a loss scale")
    bf16: Bf16 = section(Bf16, "bfloat16", deprecated=("bfloat16",))
    torch_autocast: TorchAutocast = section(TorchAutocast, "torch.autocast around the forward pass")
    fp8: Fp8 = section(Fp8, "linear layers that compute in 8 or 4 bits")
    data_types: DataTypes = section(DataTypes, "formats of single kinds of state")
    aio: Aio = section(Aio, "how the disk is read and written when state is offloaded to it")
    activation_checkpointing: ActivationCheckpointing = section(
        ActivationCheckpointing, "activations that are recomputed instead of being saved"
    )
    tensorboard: Tensorboard = section(Tensorboard, "TensorBoard's event files")
    csv_monitor: CsvMonitor = section(CsvMonitor, "CSV files")
    prometheus: PrometheusSection = section(PrometheusSection, "values for a Prometheus server")
    goodput: GoodputSection = section(GoodputSection, "where the time of a run goes")
    wandb: Wandb = section(Wandb, "Weights & Biases")
    comet: Comet = section(Comet, "Comet")
    mlflow: MlflowMonitor = section(MlflowMonitor, "MLflow")
    comms_logger: CommsLogger = section(CommsLogger, "times of collectives")
    flops_profiler: FlopsProfilerSection = section(FlopsProfilerSection, "operations of one step, by module")
    checkpoint: Checkpoint = section(Checkpoint, "saving and loading")
    autotuning: Autotuning = section(Autotuning, "a search for the fastest stage and micro-batch")
    elasticity: Elasticity = section(Elasticity, "a batch size that many world sizes share")
    curriculum_learning: CurriculumLearning = section(CurriculumLearning, "short sequences first")
    data_efficiency: DataEfficiency = section(DataEfficiency, "less data or less work for the same loss")
    progressive_layer_drop: ProgressiveLayerDropSection = section(
        ProgressiveLayerDropSection, "layers skipped at random"
    )

    compat: str | None = key(None, "a DeepSpeed version (`ds-0.18`) whose defaults apply; null: the newest")
    strict: bool | Literal["warn"] = key(True, "an unknown key is an error (true), or a warning ('warn')")
    tensor_parallel: TensorParallel = section(TensorParallel, "layers split over ranks")
    expert_parallel: ExpertParallel = section(ExpertParallel, "experts divided among ranks")
    sequence_parallel_size: int | None = key(None, "sequence-parallel ranks; null: parallel.sp", ge=1)
    data_parallel_size: int | None = key(None, "data-parallel ranks, as a check; null: those that are left", ge=1)
    compile: Compile = section(Compile, "compilation of the model")
    pipeline: Pipeline = section(Pipeline, "a model cut into pipeline stages")
    parallel: Parallel = section(Parallel, "the mesh: how many ranks along each axis; 'auto': `initialize` plans it")
    units: Units = section(Units, "modules that are gathered together")
    offload: Literal["auto"] | None = key(
        None,
        "'auto': state goes to the device first, then to host memory, then to the disk of nvme_path, by free space",
    )
    offload_activation: OffloadActivation = section(OffloadActivation, "saved activations on the host")
    precision: PrecisionSection = section(
        PrecisionSection, "formats of communication and state, and numbers that are not finite"
    )
    wire: WireSection = section(WireSection, "formats in which parameters, gradients and activations are sent")
    local_steps: LocalStepsSection = section(LocalStepsSection, "replicas that are synchronised from time to time")
    fault_tolerance: FaultToleranceSection = section(FaultToleranceSection, "replicas that are jobs of their own")
    loss_spike: LossSpikeSection = section(LossSpikeSection, "steps whose loss is far above those before")
    device_check: DeviceCheckSection = section(DeviceCheckSection, "devices that are slow or compute wrong")
    timeouts: Timeouts = section(Timeouts, "hangs, which are explained and ended")
    debug: Debug = section(Debug, "checks that cost time")
    data: Data = section(Data, "the loader of `training_data`")
