"""DeepSpeed's modules, which give its names to objects of Shoal and torch, as one table.

    runtime.pipe.module = shoal.pipeline.layers: LayerSpec TiedLayerSpec
        shoal.errors: PipelineError=ShoalError

A module below ``deepspeed``; where objects are defined, a line each; their names, ``theirs=ours`` where the two differ,
on further lines where they are many. A source that begins with a dot lies below ``shoal.compat.deepspeed``. An entry
without sources is a package that only has submodules.
``shoal.compat.table_finder`` makes a module when it is imported.
"""

from __future__ import annotations

_GROUP_NAMES = (
    "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_group"
    " get_model_parallel_rank get_model_parallel_world_size get_tensor_model_parallel_group"
    " get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size initialize"
)
_GATHERED = "GatheredParameters register_external_parameter unregister_external_parameter"
_SAFE_SETTERS = (
    "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param"
    " safe_set_local_grad safe_set_local_optimizer_state"
)
_SAFE_ACCESSORS = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param"
    " safe_get_local_grad safe_get_local_optimizer_state safe_update_full_grad_vectorized"
)

# Constants whose value is their name in lower case: keys of a configuration or of a checkpoint's file.
_CHECKPOINT_KEYS = (
    "OPTIMIZER_STATE_DICT FP32_GROUPS FP32_FLAT_GROUPS BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP"
    " SINGLE_PARTITION_OF_FP32_GROUPS PARAM_GROUPS GROUP_PADDINGS PARAM_ALIGNMENT_PADDINGS PARAM_SLICE_MAPPINGS"
    " PARTITION_COUNT ZERO_STAGE CLIP_GRAD LOSS_SCALER PARAM_SHAPES BUFFER_NAMES FROZEN_PARAM_SHAPES"
    " FROZEN_PARAM_FRAGMENTS DS_VERSION PARAM CAT_DIM VOCAB_TENSOR PADDED_VOCAB_SIZE ORIGINAL_VOCAB_SIZE"
    " PARAM_N_SUB_PARAMS SUB_PARAM_SHAPE SUB_PARAMS_SHAPE SUB_PARAM_SHARD_WIDTHS UNIVERSAL_CHECKPOINT_INFO"
    " VOCABULARY_PARAMETER_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS PARAMETER_TO_AVERAGE_PATTERNS"
    " PARAMETER_WITH_ROW_PARALLELISM_PATTERNS TP_REPLICATED_PARAMETER_PATTERNS"
    " PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_WITH_SUB_PARAMS AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS"
)
KEYS: dict[str, str] = {
    "checkpoint": _CHECKPOINT_KEYS,
    "checkpoint.constants": _CHECKPOINT_KEYS,
    "runtime.constants": (
        "BF16 COMMUNICATION_DATA_TYPE DISABLE_ALLGATHER DUMP_STATE FP16 GRADIENT_ACCUMULATION_STEPS GRADIENT_CLIPPING"
        " GRADIENT_PREDIVIDE_FACTOR MAX_GRAD_NORM OPTIMIZER PRESCALE_GRADIENTS SCHEDULER SPARSE_GRADIENTS"
        " STEPS_PER_PRINT TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU TYPE WALL_CLOCK_BREAKDOWN"
        " ZERO_ALLOW_UNTESTED_OPTIMIZER ZERO_FORCE_DS_CPU_OPTIMIZER"
    ),
    "runtime.lr_schedules": (
        "COS_MIN_RATIO CYCLE_FIRST_STAIR_COUNT CYCLE_FIRST_STEP_SIZE CYCLE_MAX_LR CYCLE_MAX_MOM CYCLE_MIN_LR"
        " CYCLE_MIN_MOM CYCLE_MOMENTUM CYCLE_SECOND_STAIR_COUNT CYCLE_SECOND_STEP_SIZE DECAY_LR_RATE DECAY_MOM_RATE"
        " DECAY_STEP_SIZE EDGE_VALUE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STAIRCASE LR_RANGE_TEST_STEP_RATE"
        " LR_RANGE_TEST_STEP_SIZE LR_SCHEDULE MID_VALUE TOTAL_NUM_STEPS WARMUP_MAX_LR WARMUP_MIN_LR WARMUP_MIN_RATIO"
        " WARMUP_NUM_STEPS WARMUP_TYPE"
    ),
}
_CHECKPOINT_CONSTANTS = (
    "BF16_ZERO_FILE_PREFIX CHECKPOINT_PARALLEL_DIMS CHECKPOINT_PP_DEGREE CHECKPOINT_TP_DEGREE FP16_ZERO_FILE_PREFIX"
    " FP32_WEIGHT_KEY LAYER_FILE_PREFIX MODEL_FILE_PREFIX MODEL_FILE_SUFFIX OPTIM_FILE_SUFFIX"
    " UNIVERSAL_CHECKPOINT_VERSION_KEY UNIVERSAL_CHECKPOINT_VERSION_VALUE ZERO_FILE_PREFIX"
)
_LEAF_MODULES = (
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name"
    " set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter"
)
_COLLECTIVES = """torch.distributed: P2POp ProcessGroup ReduceOp batch_isend_irecv is_available
    shoal.comm.world: init_distributed
    shoal.compat.collectives: all_gather all_gather_coalesced all_gather_into_tensor allgather_fn=all_gather_into_tensor
        all_gather_object all_reduce inference_all_reduce=all_reduce all_reduce_coalesced all_to_all all_to_all_single
        barrier broadcast broadcast_object_list configure destroy_process_group gather get_all_ranks_from_group
        get_global_rank get_local_rank get_rank get_world_group get_world_size has_all_gather_into_tensor
        has_all_reduce_coalesced=has_all_gather_into_tensor has_coalescing_manager=has_all_gather_into_tensor
        has_reduce_scatter_tensor=has_all_gather_into_tensor initialize_mesh_device irecv is_initialized isend
        log_summary monitored_barrier mpi_discovery new_group recv reduce reduce_scatter reduce_scatter_tensor
        reduce_scatter_fn=reduce_scatter_tensor reset_log scatter send set_backend"""

_TABLE = f"""
deepspeed = shoal.compat.about: __version__=version version __version_major__=version_major
        __version_minor__=version_minor __version_patch__=version_patch __git_hash__=git_hash git_hash
        __git_branch__=git_branch git_branch
    shoal.compat.accelerator: get_accelerator
    shoal.compat.entry: DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable initialize set_autotp_mode tp_model_init
    shoal.compat.small_functions: OnDevice is_compile_supported log_dist logger
    shoal.comm.world: init_distributed
    shoal.compat.config: DeepSpeedConfig
    shoal.compat.engine: DeepSpeedEngine
    shoal.compat.lr_schedules: add_tuning_arguments
    shoal.compat.optimizer: DeepSpeedOptimizer
    shoal.config: add_config_arguments
    shoal.data: DeepSpeedDataLoader=Loader
    shoal.errors: DeepSpeedConfigError=ConfigError
accelerator = shoal.compat.accelerator: DeepSpeedAccelerator get_accelerator is_current_accelerator_supported
        set_accelerator
accelerator.abstract_accelerator = shoal.compat.accelerator: DeepSpeedAccelerator
accelerator.real_accelerator = shoal.compat.accelerator: DeepSpeedAccelerator SUPPORTED_ACCELERATOR_LIST get_accelerator
        is_current_accelerator_supported set_accelerator
checkpoint = shoal.compat.checkpoint_reader: DeepSpeedCheckpoint SubparamShape
    shoal.compat.small_functions: {_CHECKPOINT_CONSTANTS}
    .checkpoint.universal_checkpoint: enable_universal_checkpoint
checkpoint.constants = shoal.compat.small_functions: {_CHECKPOINT_CONSTANTS}
checkpoint.deepspeed_checkpoint = shoal.compat.checkpoint_reader: ARGS_KEY CHECKPOINT_INFO_KEY DeepSpeedCheckpoint
        EMBEDDING_LAYER_INDEX FINAL_LAYER_NORM_INDEX ITERATION_KEY
checkpoint.ds_to_universal = shoal.compat.checkpoint_reader: main=make_folder parse_arguments
checkpoint.universal_checkpoint = shoal.compat.checkpoint_reader: SubparamShape
checkpoint.utils = shoal.compat.checkpoint_reader: clone_tensors_for_torch_save
comm = {_COLLECTIVES}
comm.comm = {_COLLECTIVES}
comm.reduce_op = torch.distributed: ReduceOp
constants = shoal.compat.small_functions: CROSS_RANK CROSS_SIZE LOCAL_RANK TORCH_DISTRIBUTED_DEFAULT_PORT
        default_pg_timeout
elasticity = .elasticity: config
    .elasticity.config: ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize
    .elasticity.elastic_agent: DSElasticAgent
    shoal.compat.elastic: compute_elastic_config elasticity_enabled
elasticity.config = shoal.config.elastic: ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize
elasticity.elasticity = shoal.compat.elastic: compute_elastic_config elasticity_enabled
env_report = shoal.compat.about: cli_main main report
git_version_info = shoal.compat.about: compatible_ops=__compatible_ops__ git_branch git_hash installed_ops torch_info
        version
launcher
launcher.constants = shoal.compat.small_functions: IMPI_LAUNCHER MPICH_LAUNCHER MVAPICH_LAUNCHER OPENMPI_LAUNCHER
        PDSH_LAUNCHER PDSH_MAX_FAN_OUT SLURM_LAUNCHER
launcher.runner = shoal.compat.launching: DEEPSPEED_ENVIRONMENT_NAME fetch_hostfile main parse_args
        parse_inclusion_exclusion parse_resource_filter DLTS_HOSTFILE=DEFAULT_HOSTFILE _parse_hostfile=parse_hostfile
moe
moe.experts = shoal.parallel.expert.layer: Experts
moe.layer = shoal.parallel.expert.layer: Experts MOELayer MoE TopKGate
moe.mappings = shoal.compat.experts: drop_tokens gather_tokens
moe.sharded_moe = shoal.parallel.expert.layer: MOELayer TopKGate
    shoal.parallel.expert.gate: top1gating top2gating topkgating
    shoal.compat.experts: drop_tokens gather_tokens
moe.utils = shoal.compat.experts: configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group
        split_params_into_different_moe_groups_for_optimizer
        split_params_into_shared_and_expert_params
    shoal.parallel.expert.layer: MoE
monitor
monitor.config = shoal.compat.monitors: CSVConfig CometConfig DeepSpeedMonitorConfig TensorBoardConfig WandbConfig
        get_monitor_config
monitor.monitor = shoal.compat.monitors: MonitorMaster
    shoal.observe.monitor: Monitor
ops = .ops: adagrad adam lamb lion
    shoal.compat.op_builders: __compatible_ops__
ops.adagrad = shoal.compat.optimizers: DeepSpeedCPUAdagrad
ops.adagrad.cpu_adagrad = shoal.compat.optimizers: DeepSpeedCPUAdagrad
ops.adam = shoal.compat.optimizers: DeepSpeedCPUAdam FusedAdam
ops.adam.cpu_adam = shoal.compat.optimizers: DeepSpeedCPUAdam
ops.adam.fused_adam = shoal.compat.optimizers: FusedAdam
ops.aio = shoal.compat.op_builders: AsyncIOBuilder
ops.lamb = shoal.compat.optimizers: FusedLamb
ops.lamb.fused_lamb = shoal.compat.optimizers: FusedLamb
ops.lion = shoal.compat.optimizers: DeepSpeedCPULion FusedLion
ops.lion.cpu_lion = shoal.compat.optimizers: DeepSpeedCPULion
ops.lion.fused_lion = shoal.compat.optimizers: FusedLion
ops.op_builder = shoal.compat.op_builders: AsyncIOBuilder CCLCommBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder
        CPUOpBuilder CUDAOpBuilder DeepCompileBuilder EvoformerAttnBuilder FPQuantizerBuilder FusedAdamBuilder
        FusedLambBuilder FusedLionBuilder GDSBuilder InferenceBuilder InferenceCoreBuilder InferenceCutlassBuilder
        NotImplementedBuilder OpBuilder PinMemoryBuilder QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder
        RandomLTDBuilder ShareMemCommBuilder SparseAttnBuilder SpatialInferenceBuilder StochasticTransformerBuilder
        TransformerBuilder UtilsBuilder
ops.op_builder.all_ops = shoal.compat.op_builders: ALL_OPS __op_builders__
ops.op_builder.builder = shoal.compat.op_builders: CUDAOpBuilder OpBuilder
pipe = shoal.pipeline.layers: LayerSpec TiedLayerSpec
    shoal.pipeline.module: PipelineModule
profiling
profiling.flops_profiler = shoal.observe.flops_profiler: FlopsProfiler get_model_profile
profiling.flops_profiler.profiler = shoal.observe.flops_profiler: FlopsProfiler get_model_profile
    shoal.observe.flops_text: bytes_to_string duration_to_string flops_to_string macs_to_string number_to_string
        params_to_string
runtime
runtime.activation_checkpointing
runtime.activation_checkpointing.checkpointing = shoal.parallel.recompute: checkpoint configure get_cuda_rng_tracker
        is_configured model_parallel_cuda_manual_seed non_reentrant_checkpoint partition_activations_in_checkpoint reset
        set_num_layers
    shoal.parallel.rng_tracker: CudaRNGStatesTracker=RngTracker
runtime.base_optimizer = shoal.compat.optimizer: DeepSpeedOptimizer ZeROOptimizer=ShardedOptimizer
runtime.bf16_optimizer = shoal.compat.optimizer: BF16_Optimizer
runtime.comm
runtime.compiler = shoal.compat.small_functions: is_compile_supported
    torch.compiler: disable is_compiling
runtime.config = shoal.compat.config: ADAGRAD_OPTIMIZER ADAMW_OPTIMIZER ADAM_OPTIMIZER DEEPSPEED_OPTIMIZERS
        DeepSpeedConfig LAMB_OPTIMIZER LION_OPTIMIZER MUON_OPTIMIZER
    shoal.errors: DeepSpeedConfigError=ConfigError
runtime.constants = shoal.compat.small_functions: OPTIMIZER_PARAMS ROUTE_ENCODE ROUTE_EVAL ROUTE_PREDICT ROUTE_TRAIN
        SCHEDULER_PARAMS
runtime.data_pipeline
runtime.data_pipeline.curriculum_scheduler = shoal.data.curriculum: CurriculumScheduler
runtime.data_pipeline.data_routing
runtime.data_pipeline.data_routing.helper = shoal.compat.data_pipeline: convert_to_random_ltd
        remove_random_ltd_state_dict save_without_random_ltd
runtime.data_pipeline.data_routing.scheduler = shoal.data.random_ltd: RandomLTDScheduler
runtime.data_pipeline.data_sampling
runtime.data_pipeline.data_sampling.data_analyzer = shoal.compat.data_pipeline: DataAnalyzer DistributedDataAnalyzer
runtime.data_pipeline.data_sampling.variable_batch_size_and_lr = shoal.data.by_tokens: VariableBatchSizeLR
        batch_by_seqlens get_dataloader_and_lr_scheduler_for_variable_batch_size
        get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed scale_lr
runtime.dataloader = shoal.data: DeepSpeedDataLoader=Loader RepeatingLoader
runtime.engine = shoal.compat.entry: DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable
    shoal.compat.engine: DeepSpeedEngine
runtime.entry = shoal.compat.entry: DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable initialize set_autotp_mode
        tp_model_init
    shoal.compat.deepspeed: default_inference_config init_inference
runtime.fp16
runtime.fp16.fused_optimizer = shoal.compat.optimizer: FP16_Optimizer
runtime.fp16.loss_scaler = shoal.compat.small_functions: LossScaler
    shoal.optim.loss_scale: DynamicLossScaler=LossScale LossScalerBase=LossScale
runtime.fp16.onebit = shoal.compat.optimizers: OnebitAdam OnebitLamb ZeroOneAdam
runtime.fp16.onebit.adam = shoal.compat.optimizers: OnebitAdam
runtime.fp16.onebit.lamb = shoal.compat.optimizers: OnebitLamb
runtime.fp16.onebit.zoadam = shoal.compat.optimizers: ZeroOneAdam
runtime.fp16.unfused_optimizer = shoal.compat.optimizer: FP16_UnfusedOptimizer
runtime.lr_schedules = shoal.compat.lr_schedules: LR_RANGE_TEST ONE_CYCLE WARMUP_COSINE_LR WARMUP_DECAY_LR
        WARMUP_LINEAR_RATE WARMUP_LOG_RATE WARMUP_LR add_tuning_arguments
    shoal.optim.schedules: LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR WarmupDecayLR WarmupLR
        get_torch_optimizer=torch_optimizer
runtime.pipe = shoal.pipeline.layers: LayerSpec TiedLayerSpec
    shoal.pipeline.module: PipelineModule
    shoal.pipeline.topology: ProcessTopology
runtime.pipe.engine = shoal.compat.engine: PipelineEngine=DeepSpeedPipelineEngine
runtime.pipe.module = shoal.pipeline.layers: LayerSpec TiedLayerSpec
    shoal.pipeline.module: PipelineModule
    shoal.errors: PipelineError=ShoalError
runtime.pipe.schedule = shoal.compat.pipe_schedule: PipeSchedule InferenceSchedule TrainSchedule DataParallelSchedule
        PipeInstruction OptimizerStep ReduceGrads ReduceTiedGrads BufferOpInstruction LoadMicroBatch ForwardPass
        BackwardPass SendActivation RecvActivation SendGrad RecvGrad
runtime.pipe.topology = shoal.pipeline.topology: PipeDataParallelTopology PipeModelDataParallelTopology
        PipelineParallelGrid ProcessTopology
runtime.precision_config = shoal.config.schema: DeepSpeedBF16Config=Bf16 DeepSpeedFP16Config=Fp16
runtime.progressive_layer_drop = shoal.models.layer_drop: ProgressiveLayerDrop
runtime.sequence_parallel
runtime.sequence_parallel.parallel_state_sp = shoal.compat.sequence_parallel: initialize_sequence_parallel
        get_sequence_parallel_group get_sequence_parallel_world_size get_sequence_parallel_rank
        get_sequence_data_parallel_group get_sequence_data_parallel_world_size get_sequence_data_parallel_rank
runtime.sequence_parallel.ulysses_sp = shoal.compat.sequence_parallel: UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter
    shoal.compat.sequence_tiling: SequenceTiledCompute TiledMLP TiledFusedLogitsLoss sequence_tiled_compute
runtime.swap_tensor = shoal.compat.small_functions: MIN_SWAPPABLE_BYTES
runtime.utils = shoal.compat.accelerator: get_accelerator
    shoal.compat.small_functions: DummyOptim clip_grad_norm_ empty_cache get_global_norm get_grad_norm move_to_device
        partition_balanced see_memory_usage
    shoal.parallel.sequence.chunks: partition_uniform=cuts
    shoal.pipeline.module: set_random_seed
runtime.zero = shoal.compat.parameters: ZeroParamStatus
    shoal.compat.zero_init: DeepSpeedTensorOverride Init MiCS_Init=Init ZeroParamType unwrap_model_for_generation
    shoal.compat.tiled_linear: TiledLinear TiledLinearReturnBias
    shoal.compat.hook_switch: DeepSpeedZeRoOffload=ParameterOffload
    shoal.zero: {_GATHERED}
runtime.zero.config = shoal.config.zero: DeepSpeedZeroConfig=ZeroOptimization
        DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizer DeepSpeedZeroOffloadParamConfig=OffloadParam
    shoal.compat.small_functions: OffloadDeviceEnum ZeroStageEnum
runtime.zero.leaf_module_config = shoal.config.zero: DeepSpeedZeroLeafModuleConfig=LeafModule
runtime.zero.linear = torch.nn: LinearModuleForZeroStage3=Linear
    torch.nn.functional: zero3_linear_wrap=linear
runtime.zero.mics = shoal.compat.zero_init: MiCS_Init=Init
runtime.zero.offload_config = shoal.config.zero: DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizer
        DeepSpeedZeroOffloadParamConfig=OffloadParam
    shoal.compat.small_functions: OffloadDeviceEnum OffloadStateTypeEnum
runtime.zero.parameter_offload = shoal.compat.hook_switch: DeepSpeedZeRoOffload=ParameterOffload
runtime.zero.partition_parameters = shoal.compat.accelerator: get_accelerator
    shoal.compat.parameters: ZeroParamStatus is_zero_param=is_zero_parameter
    shoal.compat.zero_init: DEFAULT_TENSOR_OVERRIDES DeepSpeedTensorOverride Init ZeroParamType
        zero_wrapper_for_fp_tensor_constructor
    shoal.zero: {_GATHERED}
    torch: _orig_torch_tensor=tensor _orig_torch_empty=empty _orig_torch_zeros=zeros _orig_torch_ones=ones
        _orig_torch_full=full _orig_torch_arange=arange _orig_torch_eye=eye _orig_torch_randn=randn
runtime.zero.stage3 = shoal.compat.optimizer: DeepSpeedZeroOptimizer_Stage3
    shoal.compat.estimates: estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold
        estimate_zero3_model_states_mem_needs_all_live
    shoal.compat.zero_init: unwrap_model_for_generation
runtime.zero.stage_1_and_2 = shoal.compat.optimizer: DeepSpeedZeroOptimizer
    shoal.compat.estimates: estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold
        estimate_zero2_model_states_mem_needs_all_live
runtime.zero.tiling = shoal.compat.tiled_linear: TiledLinear TiledLinearReturnBias
runtime.zero.utils = shoal.compat.small_functions: is_zero_supported_optimizer
    shoal.compat.parameters: is_zero_param=is_zero_parameter
    shoal.errors: ZeRORuntimeException=ShoalError
sequence
sequence.cross_entropy = shoal.compat.sequence_tiling: vocab_sequence_parallel_cross_entropy
sequence.layer = shoal.compat.sequence_parallel: DistributedAttention
utils = .utils: groups
    .utils.z3_leaf_module: {_LEAF_MODULES}
    shoal.compat.collectives: get_caller_func
    shoal.compat.groups: {_GROUP_NAMES}
    shoal.compat.parameters: {_SAFE_ACCESSORS}
    shoal.compat.small_functions: OnDevice instrument_w_nvtx log_dist log_dist_once logger set_log_level_from_string
    shoal.data: RepeatingLoader
    shoal.zero: {_SAFE_SETTERS}
utils.comms_logging = shoal.compat.collectives: calc_bw_log convert_size get_caller_func
utils.groups = shoal.compat.groups: {_GROUP_NAMES} _clone_world_group _get_data_parallel_group
        _get_data_parallel_world_size _get_data_parallel_rank _get_data_parallel_group_ranks
        _get_sequence_data_parallel_group _get_sequence_data_parallel_world_size _get_sequence_data_parallel_rank
        _get_sequence_parallel_group _get_sequence_parallel_world_size _get_sequence_parallel_rank
        _get_model_parallel_world_size _get_broadcast_src_rank _get_expert_model_parallel_world_size
        _get_expert_parallel_group _get_expert_parallel_group_ranks _get_expert_parallel_world_size
        _get_expert_parallel_rank _get_expert_parallel_src_rank _get_expert_parallel_group_dict
        _get_expert_data_parallel_group _get_expert_data_parallel_group_ranks _get_expert_data_parallel_world_size
        _get_expert_data_parallel_rank _get_expert_broadcast_src_rank _get_expert_data_parallel_group_dict
        _get_max_expert_size _get_max_expert_size_name _get_max_expert_parallel_group
        _get_zero_param_intra_parallel_group
utils.init_on_device = shoal.compat.small_functions: OnDevice
utils.logging = shoal.compat.small_functions: log_dist log_dist_once log_levels logger set_log_level_from_string
        warning_once
utils.nvtx = shoal.compat.small_functions: instrument_w_nvtx
utils.tensor_fragment = shoal.compat.parameters: {_SAFE_ACCESSORS}
    shoal.zero: {_SAFE_SETTERS}
utils.timer = shoal.compat.accelerator: get_accelerator
    shoal.compat.small_functions: logger
    shoal.compat.timer: BACKWARD_GLOBAL_TIMER BACKWARD_MICRO_TIMER FORWARD_GLOBAL_TIMER FORWARD_MICRO_TIMER
        STEP_GLOBAL_TIMER STEP_MICRO_TIMER SynchronizedWallClockTimer ThroughputTimer
utils.torch = shoal.compat.small_functions: register_grad_hook required_torch_version
utils.z3_leaf_module = shoal.compat.leaf_modules: {_LEAF_MODULES}
utils.zero_to_fp32 = shoal.compat.zero_to_fp32: convert_zero_checkpoint_to_fp32_state_dict
        convert_zero_checkpoint_to_state_dict get_fp32_state_dict_from_zero_checkpoint get_model_state_file
        get_model_state_files get_optim_files load_state_dict_from_zero_checkpoint main
utils.zero_to_torch = shoal.compat.zero_to_fp32: main=main_to_torch
"""


def _read(table: str) -> dict[str, dict[str, str]]:
    """By module, the names by source."""
    modules: dict[str, dict[str, str]] = {}
    source, sources = "", {}
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            module, _, line = line.partition(" = ")
            sources = modules[module] = {}
        if ": " in line:
            source, _, sources[source] = line.strip().partition(": ")
        elif line:
            sources[source] += f" {line.strip()}"
    return modules


EXPORTS = _read(_TABLE)
TOP = EXPORTS.pop("deepspeed")  # the names of ``deepspeed`` itself

# What ``python -m deepspeed.MODULE`` calls.
PROGRAMS: dict[str, str] = {
    "checkpoint.ds_to_universal": "shoal.compat.checkpoint_reader:to_universal",
    "env_report": "shoal.compat.about:cli_main",
    "launcher.runner": "shoal.compat.launching:command",
    "utils.zero_to_fp32": "shoal.compat.zero_to_fp32:main",
    "utils.zero_to_torch": "shoal.compat.zero_to_fp32:main_to_torch",
}
