"""The whole file as one model: every key of DeepSpeed's schema and Shoal's own."""

from __future__ import annotations

from typing import Literal

from shoal.config.base import Dtype, Section, key, section
from shoal.config.experts import ExpertParallel
from shoal.config.optimizer import Optimizer, Scheduler
from shoal.config.parallel import Parallel, TensorParallel
from shoal.config.pipeline import Pipeline
from shoal.config.sections import (
    ActivationCheckpointing,
    Aio,
    Bf16,
    Checkpoint,
    Comet,
    CommsLogger,
    Compile,
    CsvMonitor,
    CurriculumLearning,
    Data,
    DataTypes,
    Debug,
    Elasticity,
    FlopsProfilerSection,
    Fp16,
    MlflowMonitor,
    OffloadActivation,
    PrecisionSection,
    ProgressiveLayerDropSection,
    Tensorboard,
    TorchAutocast,
    Units,
    Wandb,
)
from shoal.config.tables import with_unsupported
from shoal.config.zero import ZeroOptimization

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
    data_types: DataTypes = section(DataTypes, "formats of single kinds of state")
    aio: Aio = section(Aio, "how the disk is read and written when state is offloaded to it")
    activation_checkpointing: ActivationCheckpointing = section(
        ActivationCheckpointing, "activations that are recomputed instead of being saved"
    )
    tensorboard: Tensorboard = section(Tensorboard, "TensorBoard's event files")
    csv_monitor: CsvMonitor = section(CsvMonitor, "CSV files")
    wandb: Wandb = section(Wandb, "Weights & Biases")
    comet: Comet = section(Comet, "Comet")
    mlflow: MlflowMonitor = section(MlflowMonitor, "MLflow")
    comms_logger: CommsLogger = section(CommsLogger, "times of collectives")
    flops_profiler: FlopsProfilerSection = section(FlopsProfilerSection, "operations of one step, by module")
    checkpoint: Checkpoint = section(Checkpoint, "saving and loading")
    elasticity: Elasticity = section(Elasticity, "a batch size that many world sizes share")
    curriculum_learning: CurriculumLearning = section(CurriculumLearning, "short sequences first")
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
    parallel: Parallel = section(Parallel, "the mesh: how many ranks along each axis")
    units: Units = section(Units, "modules that are gathered together")
    offload: Literal["auto"] | None = key(
        None,
        "'auto': state goes to the device first, then to host memory, then to the disk of nvme_path, by free space",
    )
    offload_activation: OffloadActivation = section(OffloadActivation, "saved activations on the host")
    precision: PrecisionSection = section(
        PrecisionSection, "formats of communication and state, and numbers that are not finite"
    )
    debug: Debug = section(Debug, "checks that cost time")
    data: Data = section(Data, "the position in the training data")
