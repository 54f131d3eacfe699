"""The modules of DeepSpeed that only give its names to objects of Shoal and torch, as one table.

    name below ``deepspeed``      where an object is defined     its name; ``theirs=ours`` where the two differ
    runtime.base_optimizer        shoal.compat.optimizer         DeepSpeedOptimizer ZeROOptimizer=ShardedOptimizer

``shoal.compat.table_finder`` makes a module when it is imported. A source that begins with a dot lies below
``shoal.compat.deepspeed``. An empty entry is a package that only contains other modules.
"""

from __future__ import annotations

_ACCELERATOR = "shoal.compat.accelerator"
_BUILDERS = "shoal.compat.op_builders"
_CONFIG = "shoal.compat.config_models"
_CONSTANTS = "shoal.compat.constants"
_EXPERTS = "shoal.compat.experts"
_LAYERS = "shoal.pipeline.layers"
_MOE_LAYER = "shoal.parallel.expert.layer"
_MONITORS = "shoal.compat.monitors"
_OPTIMIZERS = "shoal.compat.optimizers"
_SEQUENCE = "shoal.compat.sequence_parallel"
_TILING = "shoal.compat.sequence_tiling"
_SMALL = "shoal.compat.small_functions"
_STAGES = "shoal.pipeline.module"
_TOPOLOGY = "shoal.pipeline.topology"

EXPORTS: dict[str, dict[str, str]] = {
    "accelerator": {
        _ACCELERATOR: "DeepSpeedAccelerator get_accelerator is_current_accelerator_supported set_accelerator",
    },
    "accelerator.abstract_accelerator": {_ACCELERATOR: "DeepSpeedAccelerator"},
    "accelerator.real_accelerator": {
        _ACCELERATOR: (
            "DeepSpeedAccelerator SUPPORTED_ACCELERATOR_LIST get_accelerator is_current_accelerator_supported"
            " set_accelerator"
        ),
    },
    "checkpoint.utils": {
        _SMALL: (
            "clone_tensors_for_torch_save get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank"
            " get_zero_ckpt_name_for_rank"
        ),
    },
    "comm.reduce_op": {"torch.distributed": "ReduceOp"},
    "constants": {
        _CONSTANTS: "CROSS_RANK CROSS_SIZE LOCAL_RANK TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",
    },
    "elasticity": {
        ".elasticity": "config",
        ".elasticity.config": (
            "ElasticityConfig ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize"
        ),
        ".elasticity.elastic_agent": "DSElasticAgent",
        "shoal.compat.elastic": "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config",
    },
    "elasticity.config": {
        "shoal.compat.elastic": "ElasticityConfig",
        "shoal.config.elastic": "ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize",
    },
    "elasticity.elasticity": {
        "shoal.compat.elastic": "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config",
    },
    "launcher": {},
    "launcher.constants": {
        _CONSTANTS: (
            "IMPI_LAUNCHER MPICH_LAUNCHER MVAPICH_LAUNCHER OPENMPI_LAUNCHER PDSH_LAUNCHER PDSH_MAX_FAN_OUT"
            " SLURM_LAUNCHER"
        ),
    },
    "launcher.runner": {
        "shoal.compat.launching": (
            "DEEPSPEED_ENVIRONMENT_NAME fetch_hostfile main parse_args parse_inclusion_exclusion parse_resource_filter"
            " DLTS_HOSTFILE=DEFAULT_HOSTFILE _parse_hostfile=parse_hostfile"
        ),
    },
    "moe": {},
    "moe.experts": {_MOE_LAYER: "Experts"},
    "moe.layer": {_MOE_LAYER: "Experts MOELayer MoE TopKGate"},
    "moe.mappings": {_EXPERTS: "drop_tokens gather_tokens"},
    "moe.sharded_moe": {
        _MOE_LAYER: "MOELayer TopKGate",
        "shoal.parallel.expert.dense": "top1gating top2gating topkgating",
        _EXPERTS: "drop_tokens gather_tokens",
    },
    "moe.utils": {
        _EXPERTS: (
            "configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group"
            " split_params_grads_into_shared_and_expert_params split_params_into_different_moe_groups_for_optimizer"
            " split_params_into_shared_and_expert_params"
        ),
        _MOE_LAYER: "MoE",
    },
    "monitor": {},
    "monitor.comet": {_MONITORS: "CometMonitor"},
    "monitor.config": {
        _MONITORS: "CSVConfig CometConfig DeepSpeedMonitorConfig TensorBoardConfig WandbConfig get_monitor_config",
    },
    "monitor.csv_monitor": {_MONITORS: "csvMonitor"},
    "monitor.monitor": {_MONITORS: "MonitorMaster", "shoal.observe.monitor": "Monitor"},
    "monitor.tensorboard": {_MONITORS: "TensorBoardMonitor"},
    "monitor.wandb": {_MONITORS: "WandbMonitor"},
    "ops": {".ops": "adagrad adam lamb lion", _BUILDERS: "__compatible_ops__"},
    "ops.adagrad": {_OPTIMIZERS: "DeepSpeedCPUAdagrad"},
    "ops.adagrad.cpu_adagrad": {_OPTIMIZERS: "DeepSpeedCPUAdagrad"},
    "ops.adam": {_OPTIMIZERS: "DeepSpeedCPUAdam FusedAdam"},
    "ops.adam.cpu_adam": {_OPTIMIZERS: "DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {_OPTIMIZERS: "FusedAdam"},
    "ops.aio": {_BUILDERS: "AsyncIOBuilder"},
    "ops.lamb": {_OPTIMIZERS: "FusedLamb"},
    "ops.lamb.fused_lamb": {_OPTIMIZERS: "FusedLamb"},
    "ops.lion": {_OPTIMIZERS: "DeepSpeedCPULion FusedLion"},
    "ops.lion.cpu_lion": {_OPTIMIZERS: "DeepSpeedCPULion"},
    "ops.lion.fused_lion": {_OPTIMIZERS: "FusedLion"},
    "ops.op_builder": {
        _BUILDERS: (
            "AsyncIOBuilder CCLCommBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder CPUOpBuilder CUDAOpBuilder"
            " DeepCompileBuilder EvoformerAttnBuilder FPQuantizerBuilder FusedAdamBuilder FusedLambBuilder"
            " FusedLionBuilder GDSBuilder InferenceBuilder InferenceCoreBuilder InferenceCutlassBuilder"
            " NotImplementedBuilder OpBuilder PinMemoryBuilder QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder"
            " RandomLTDBuilder ShareMemCommBuilder SparseAttnBuilder SpatialInferenceBuilder"
            " StochasticTransformerBuilder TransformerBuilder UtilsBuilder"
        ),
    },
    "ops.op_builder.all_ops": {_BUILDERS: "ALL_OPS __op_builders__"},
    "ops.op_builder.builder": {_BUILDERS: "CUDAOpBuilder OpBuilder"},
    "pipe": {_LAYERS: "LayerSpec TiedLayerSpec", _STAGES: "PipelineModule"},
    "profiling": {},
    "profiling.flops_profiler": {"shoal.observe.flops_profiler": "FlopsProfiler get_model_profile"},
    "profiling.flops_profiler.profiler": {
        "shoal.observe.flops_profiler": "FlopsProfiler get_model_profile",
        "shoal.observe.flops_text": (
            "bytes_to_string duration_to_string flops_to_string macs_to_string number_to_string params_to_string"
        ),
    },
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": {
        "shoal.parallel.recompute": (
            "checkpoint configure get_cuda_rng_tracker is_configured model_parallel_cuda_manual_seed"
            " non_reentrant_checkpoint partition_activations_in_checkpoint reset set_num_layers"
        ),
        "shoal.parallel.rng_tracker": "CudaRNGStatesTracker=RngTracker",
    },
    "runtime.base_optimizer": {"shoal.compat.optimizer": "DeepSpeedOptimizer ZeROOptimizer=ShardedOptimizer"},
    "runtime.bf16_optimizer": {"shoal.compat.by_stage": "BF16_Optimizer"},
    "runtime.comm": {},
    "runtime.comm.coalesced_collectives": {"shoal.compat.coalesced": "reduce_scatter_coalesced"},
    "runtime.compiler": {_SMALL: "is_compile_supported", "torch.compiler": "disable is_compiling"},
    "runtime.config_utils": {
        _CONFIG: "DeepSpeedConfigModel",
        "shoal.compat.config_readers": (
            "get_scalar_param get_dict_param=get_scalar_param get_list_param=get_scalar_param"
            " dict_raise_error_on_duplicate_keys=refuse_duplicates"
        ),
    },
    "runtime.constants": {
        _CONSTANTS: (
            "BF16 BFLOAT16 COMMUNICATION_DATA_TYPE DISABLE_ALLGATHER DUMP_STATE FP16 GRADIENT_ACCUMULATION_STEPS"
            " GRADIENT_CLIPPING GRADIENT_PREDIVIDE_FACTOR MAX_GRAD_NORM OPTIMIZER OPTIMIZER_PARAMS PRESCALE_GRADIENTS"
            " ROUTE_ENCODE ROUTE_EVAL ROUTE_PREDICT ROUTE_TRAIN SCHEDULER SCHEDULER_PARAMS SPARSE_GRADIENTS"
            " STEPS_PER_PRINT TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU TYPE WALL_CLOCK_BREAKDOWN"
            " ZERO_ALLOW_UNTESTED_OPTIMIZER ZERO_FORCE_DS_CPU_OPTIMIZER"
        ),
    },
    "runtime.data_pipeline": {},
    "runtime.data_pipeline.config": {
        ".runtime.config": "get_data_efficiency_config get_data_efficiency_enabled",
    },
    "runtime.data_pipeline.curriculum_scheduler": {"shoal.data.curriculum": "CurriculumScheduler"},
    "runtime.engine": {
        ".runtime.entry": "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
        "shoal.compat.engine": "DeepSpeedEngine",
    },
    "runtime.fp16": {},
    "runtime.fp16.fused_optimizer": {"shoal.compat.by_stage": "FP16_Optimizer"},
    "runtime.fp16.loss_scaler": {
        _SMALL: "LossScaler",
        "shoal.optim.loss_scale": "DynamicLossScaler=LossScale LossScalerBase=LossScale",
    },
    "runtime.fp16.unfused_optimizer": {"shoal.compat.by_stage": "FP16_UnfusedOptimizer"},
    "runtime.pipe": {
        _LAYERS: "LayerSpec TiedLayerSpec",
        _STAGES: "PipelineModule",
        _TOPOLOGY: "ProcessTopology",
    },
    "runtime.pipe.engine": {"shoal.compat.pipeline_engine": "PipelineEngine=DeepSpeedPipelineEngine"},
    "runtime.pipe.module": {
        _LAYERS: "LayerSpec TiedLayerSpec",
        _STAGES: "PipelineModule",
        "shoal.errors": "PipelineError=ShoalError",
    },
    "runtime.pipe.schedule": {
        "shoal.compat.pipe_schedule": (
            "PipeSchedule InferenceSchedule TrainSchedule DataParallelSchedule PipeInstruction OptimizerStep"
            " ReduceGrads ReduceTiedGrads BufferOpInstruction LoadMicroBatch ForwardPass BackwardPass SendActivation"
            " RecvActivation SendGrad RecvGrad"
        ),
    },
    "runtime.pipe.topology": {
        _TOPOLOGY: "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid ProcessTopology",
    },
    "runtime.precision_config": {
        _CONFIG: "BFLOAT16 BFLOAT16_OLD DeepSpeedBF16Config DeepSpeedFP16Config FP16 get_bfloat16_config",
        "shoal.compat.config_readers": "get_float16_config",
    },
    "runtime.progressive_layer_drop": {"shoal.models.layer_drop": "ProgressiveLayerDrop"},
    "runtime.rollout": {
        "shoal.compat.rollout": (
            "HybridEngineRollout RolloutBatch RolloutConfig RolloutEngine RolloutRequest SamplingConfig build_rollout"
        ),
    },
    "runtime.rollout.base": {
        "shoal.compat.rollout": "RolloutBatch RolloutConfig RolloutEngine RolloutRequest SamplingConfig",
    },
    "runtime.rollout.hybrid_engine_rollout": {"shoal.compat.rollout": "HybridEngineRollout"},
    "runtime.sequence_parallel": {},
    "runtime.sequence_parallel.parallel_state_sp": {
        _SEQUENCE: (
            "initialize_sequence_parallel get_sequence_parallel_group get_sequence_parallel_world_size"
            " get_sequence_parallel_rank get_sequence_data_parallel_group get_sequence_data_parallel_world_size"
            " get_sequence_data_parallel_rank"
        ),
    },
    "runtime.sequence_parallel.ulysses_sp": {
        _SEQUENCE: "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
        _TILING: "SequenceTiledCompute TiledMLP TiledFusedLogitsLoss sequence_tiled_compute",
    },
    "runtime.sparse_tensor": {"shoal.compat.sparse_tensor": "SparseTensor"},
    "runtime.swap_tensor": {_CONSTANTS: "MIN_SWAPPABLE_BYTES"},
    "runtime.zero.config": {
        _CONFIG: (
            "DeepSpeedZeroConfig DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum"
            " ZERO_OPTIMIZATION ZeroStageEnum"
        ),
        "shoal.compat.config_readers": "get_zero_config",
    },
    "runtime.zero.leaf_module_config": {"shoal.config.zero": "DeepSpeedZeroLeafModuleConfig=LeafModule"},
    "runtime.zero.linear": {
        "torch.nn": "LinearModuleForZeroStage3=Linear",
        "torch.nn.functional": "zero3_linear_wrap=linear",
    },
    "runtime.zero.mics": {"shoal.compat.zero_init": "MiCS_Init=Init"},
    "runtime.zero.offload_config": {
        _CONFIG: (
            "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum OffloadStateTypeEnum"
        ),
    },
    "runtime.zero.offload_states": {_SMALL: "get_state_devices"},
    "runtime.zero.parameter_offload": {"shoal.running.hook_switch": "DeepSpeedZeRoOffload=ParameterOffload"},
    "runtime.zero.stage3": {
        "shoal.compat.by_stage": "DeepSpeedZeroOptimizer_Stage3",
        "shoal.compat.estimates": (
            "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold"
            " estimate_zero3_model_states_mem_needs_all_live"
        ),
        "shoal.compat.zero_init": "unwrap_model_for_generation",
    },
    "runtime.zero.stage_1_and_2": {
        "shoal.compat.by_stage": "DeepSpeedZeroOptimizer",
        "shoal.compat.estimates": (
            "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold"
            " estimate_zero2_model_states_mem_needs_all_live"
        ),
    },
    "runtime.zero.utils": {
        _SMALL: "is_zero_supported_optimizer",
        "shoal.compat.parameters": "is_zero_param=is_zero_parameter",
        "shoal.errors": "ZeRORuntimeException=ShoalError",
    },
    "sequence": {},
    "sequence.cross_entropy": {_TILING: "vocab_sequence_parallel_cross_entropy"},
    "sequence.layer": {_SEQUENCE: "DistributedAttention"},
    "utils.bwc": {
        _SMALL: ("bwc_tensor_model_parallel_group bwc_tensor_model_parallel_rank bwc_tensor_model_parallel_world_size"),
    },
    "utils.config": {".runtime.config": "get_timers_config"},
    "utils.debug": {_SMALL: "print_rank0 printflock"},
    "utils.exceptions": {_SMALL: "DeprecatedException"},
    "utils.init_on_device": {_SMALL: "OnDevice"},
    "utils.logging": {
        _SMALL: (
            "get_current_level get_log_level_from_string log_dist log_dist_once log_levels logger"
            " set_log_level_from_string should_log_le warning_once"
        ),
    },
    "utils.module_utils": {_SMALL: "recursive_getattr recursive_setattr"},
    "utils.numa": {_SMALL: "get_numa_cores get_numactl_cmd parse_range parse_range_list"},
    "utils.nvtx": {_SMALL: "instrument_w_nvtx"},
    "utils.torch": {_SMALL: "register_grad_hook required_torch_version"},
    "utils.zero_to_fp32": {
        "shoal.compat.zero_to_fp32": (
            "convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict"
            " get_fp32_state_dict_from_zero_checkpoint get_model_state_file get_model_state_files get_optim_files"
            " load_state_dict_from_zero_checkpoint main"
        ),
    },
    "utils.zero_to_torch": {"shoal.compat.zero_to_fp32": "main=main_to_torch"},
}

# What ``python -m deepspeed.MODULE`` calls.
PROGRAMS: dict[str, str] = {
    "launcher.runner": "shoal.compat.launching:command",
    "utils.zero_to_fp32": "shoal.compat.zero_to_fp32:main",
    "utils.zero_to_torch": "shoal.compat.zero_to_fp32:main_to_torch",
}
