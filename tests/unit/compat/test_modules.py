"""Every module of DeepSpeed's tree is importable under both names, with these names in it, file or table entry."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
import shoal.compat.deepspeed
from shoal.compat import finder
from shoal.compat.absent import ABSENT
from shoal.compat.names import EXPORTS, PROGRAMS

TARGET = "shoal.compat.deepspeed"
ROOT = Path(shoal.__file__).resolve().parent.parent

# Name below ``deepspeed``: the public names of the module.
MODULES = {
    "": """
        DeepSpeedConfig DeepSpeedConfigError DeepSpeedDataLoader DeepSpeedEngine DeepSpeedHybridEngine
        DeepSpeedInferenceConfig DeepSpeedOptimizer DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable
        DeepSpeedTransformerConfig DeepSpeedTransformerLayer InferenceEngine OnDevice PipelineEngine
        PipelineModule __git_branch__ __git_hash__ __version__ __version_major__ __version_minor__ __version_patch__
        git_branch git_hash version add_config_arguments add_tuning_arguments checkpointing comm
        default_inference_config dist get_accelerator init_distributed init_inference initialize install
        is_compile_supported is_installed log_dist logger ops replace_transformer_layer
        revert_transformer_layer set_autotp_mode tp_model_init uninstall utils zero""",
    "accelerator": "DeepSpeedAccelerator get_accelerator is_current_accelerator_supported set_accelerator",
    "accelerator.abstract_accelerator": "DeepSpeedAccelerator",
    "accelerator.real_accelerator": """
        DeepSpeedAccelerator SUPPORTED_ACCELERATOR_LIST get_accelerator is_current_accelerator_supported
        set_accelerator""",
    "checkpoint": """
        AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP
        BF16_ZERO_FILE_PREFIX BUFFER_NAMES CAT_DIM CHECKPOINT_PARALLEL_DIMS CHECKPOINT_PP_DEGREE
        CHECKPOINT_TP_DEGREE CLIP_GRAD DS_VERSION DeepSpeedCheckpoint FP16_ZERO_FILE_PREFIX FP32_FLAT_GROUPS
        FP32_GROUPS FP32_WEIGHT_KEY FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES GROUP_PADDINGS
        LAYER_FILE_PREFIX LOSS_SCALER MODEL_FILE_PREFIX MODEL_FILE_SUFFIX OPTIMIZER_STATE_DICT
        OPTIM_FILE_SUFFIX ORIGINAL_VOCAB_SIZE PADDED_VOCAB_SIZE PARAM PARAMETER_TO_AVERAGE_PATTERNS
        PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_WITH_ROW_PARALLELISM_PATTERNS
        PARAMETER_WITH_SUB_PARAMS PARAM_ALIGNMENT_PADDINGS PARAM_GROUPS PARAM_N_SUB_PARAMS PARAM_SHAPES
        PARAM_SLICE_MAPPINGS PARTITION_COUNT PIPELINE_REPLICATED_PARAMETER_PATTERNS
        SINGLE_PARTITION_OF_FP32_GROUPS SUB_PARAMS_SHAPE SUB_PARAM_SHAPE SUB_PARAM_SHARD_WIDTHS SubparamShape
        TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO UNIVERSAL_CHECKPOINT_VERSION_KEY
        UNIVERSAL_CHECKPOINT_VERSION_VALUE VOCABULARY_PARAMETER_PATTERNS VOCAB_TENSOR ZERO_FILE_PREFIX
        ZERO_STAGE ZeROCheckpoint enable_universal_checkpoint get_model_3d_descriptor merge_state
        model_3d_desc reshape_meg_2d_parallel""",
    "checkpoint.constants": """
        AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP
        BF16_ZERO_FILE_PREFIX BUFFER_NAMES CAT_DIM CHECKPOINT_PARALLEL_DIMS CHECKPOINT_PP_DEGREE
        CHECKPOINT_TP_DEGREE CLIP_GRAD DS_VERSION FP16_ZERO_FILE_PREFIX FP32_FLAT_GROUPS FP32_GROUPS
        FP32_WEIGHT_KEY FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES GROUP_PADDINGS LAYER_FILE_PREFIX
        LOSS_SCALER MODEL_FILE_PREFIX MODEL_FILE_SUFFIX OPTIMIZER_STATE_DICT OPTIM_FILE_SUFFIX
        ORIGINAL_VOCAB_SIZE PADDED_VOCAB_SIZE PARAM PARAMETER_TO_AVERAGE_PATTERNS
        PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_WITH_ROW_PARALLELISM_PATTERNS
        PARAMETER_WITH_SUB_PARAMS PARAM_ALIGNMENT_PADDINGS PARAM_GROUPS PARAM_N_SUB_PARAMS PARAM_SHAPES
        PARAM_SLICE_MAPPINGS PARTITION_COUNT PIPELINE_REPLICATED_PARAMETER_PATTERNS
        SINGLE_PARTITION_OF_FP32_GROUPS SUB_PARAMS_SHAPE SUB_PARAM_SHAPE SUB_PARAM_SHARD_WIDTHS
        TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO UNIVERSAL_CHECKPOINT_VERSION_KEY
        UNIVERSAL_CHECKPOINT_VERSION_VALUE VOCABULARY_PARAMETER_PATTERNS VOCAB_TENSOR ZERO_FILE_PREFIX
        ZERO_STAGE""",
    "checkpoint.deepspeed_checkpoint": """
        ARGS_KEY CHECKPOINT_INFO_KEY DeepSpeedCheckpoint EMBEDDING_LAYER_INDEX FINAL_LAYER_NORM_INDEX
        ITERATION_KEY""",
    "checkpoint.ds_to_universal": "main parse_arguments",
    "checkpoint.universal_checkpoint": "SubparamShape enable_universal_checkpoint load_hp_checkpoint_state",
    "checkpoint.utils": "clone_tensors_for_torch_save",
    "comm": """
        P2POp ProcessGroup ReduceOp all_gather all_gather_coalesced all_gather_into_tensor all_gather_object
        all_reduce all_reduce_coalesced all_to_all all_to_all_single allgather_fn barrier batch_isend_irecv
        broadcast broadcast_object_list configure destroy_process_group gather get_all_ranks_from_group
        get_global_rank get_local_rank get_rank get_world_group
        get_world_size has_all_gather_into_tensor has_all_reduce_coalesced has_coalescing_manager
        has_reduce_scatter_tensor inference_all_reduce init_distributed initialize_mesh_device
        irecv is_available is_initialized isend log_summary monitored_barrier mpi_discovery new_group recv
        reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor reset_log scatter send set_backend""",
    "comm.comm": """
        P2POp ProcessGroup ReduceOp all_gather all_gather_coalesced all_gather_into_tensor all_gather_object
        all_reduce all_reduce_coalesced all_to_all all_to_all_single allgather_fn barrier batch_isend_irecv
        broadcast broadcast_object_list configure destroy_process_group gather get_all_ranks_from_group
        get_global_rank get_local_rank get_rank get_world_group
        get_world_size has_all_gather_into_tensor has_all_reduce_coalesced has_coalescing_manager
        has_reduce_scatter_tensor inference_all_reduce init_distributed initialize_mesh_device
        irecv is_available is_initialized isend log_summary monitored_barrier mpi_discovery new_group recv
        reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor reset_log scatter send set_backend""",
    "comm.reduce_op": "ReduceOp",
    "constants": "CROSS_RANK CROSS_SIZE LOCAL_RANK TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",
    "elasticity": """
        DSElasticAgent ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize
        compute_elastic_config config elasticity_enabled""",
    "elasticity.config": "ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize",
    "elasticity.elastic_agent": "DSElasticAgent",
    "elasticity.elasticity": "compute_elastic_config elasticity_enabled",
    "env_report": "cli_main main report",
    "git_version_info": "compatible_ops git_branch git_hash installed_ops torch_info version",
    "launcher": "",
    "launcher.constants": """
        IMPI_LAUNCHER MPICH_LAUNCHER MVAPICH_LAUNCHER OPENMPI_LAUNCHER PDSH_LAUNCHER PDSH_MAX_FAN_OUT
        SLURM_LAUNCHER""",
    "launcher.runner": """
        DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE fetch_hostfile main parse_args parse_inclusion_exclusion
        parse_resource_filter""",
    "linear": "Init LoRAConfig OptimizedLinear QuantizationConfig init_lora",
    "moe": "",
    "moe.experts": "Experts",
    "moe.layer": "Experts MOELayer MoE TopKGate",
    "moe.mappings": "drop_tokens gather_tokens",
    "moe.sharded_moe": "MOELayer TopKGate drop_tokens gather_tokens top1gating top2gating topkgating",
    "moe.utils": """
        MoE configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group
        split_params_into_different_moe_groups_for_optimizer
        split_params_into_shared_and_expert_params""",
    "monitor": "",
    "monitor.config": "CSVConfig CometConfig DeepSpeedMonitorConfig TensorBoardConfig WandbConfig get_monitor_config",
    "monitor.monitor": "Monitor MonitorMaster",
    "ops": "__compatible_ops__ adagrad adam lamb lion",
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "ops.adagrad.cpu_adagrad": "DeepSpeedCPUAdagrad",
    "ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "ops.adam.cpu_adam": "DeepSpeedCPUAdam",
    "ops.adam.fused_adam": "FusedAdam",
    "ops.aio": "AsyncIOBuilder",
    "ops.lamb": "FusedLamb",
    "ops.lamb.fused_lamb": "FusedLamb",
    "ops.lion": "DeepSpeedCPULion FusedLion",
    "ops.lion.cpu_lion": "DeepSpeedCPULion",
    "ops.lion.fused_lion": "FusedLion",
    "ops.op_builder": """
        AsyncIOBuilder CCLCommBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder CPUOpBuilder
        CUDAOpBuilder DeepCompileBuilder EvoformerAttnBuilder FPQuantizerBuilder FusedAdamBuilder
        FusedLambBuilder FusedLionBuilder GDSBuilder InferenceBuilder InferenceCoreBuilder
        InferenceCutlassBuilder NotImplementedBuilder OpBuilder PinMemoryBuilder QuantizerBuilder
        RaggedOpsBuilder RaggedUtilsBuilder RandomLTDBuilder ShareMemCommBuilder SparseAttnBuilder
        SpatialInferenceBuilder StochasticTransformerBuilder TransformerBuilder UtilsBuilder""",
    "ops.op_builder.all_ops": "ALL_OPS __op_builders__",
    "ops.op_builder.builder": "CUDAOpBuilder OpBuilder",
    "pipe": "LayerSpec PipelineModule TiedLayerSpec",
    "profiling": "",
    "profiling.flops_profiler": "FlopsProfiler get_model_profile",
    "profiling.flops_profiler.profiler": """
        FlopsProfiler bytes_to_string duration_to_string flops_to_string get_model_profile macs_to_string
        number_to_string params_to_string""",
    "runtime": "",
    "runtime.activation_checkpointing": "",
    "runtime.activation_checkpointing.checkpointing": """
        CudaRNGStatesTracker checkpoint configure get_cuda_rng_tracker is_configured
        model_parallel_cuda_manual_seed non_reentrant_checkpoint partition_activations_in_checkpoint reset
        set_num_layers""",
    "runtime.base_optimizer": "DeepSpeedOptimizer ZeROOptimizer",
    "runtime.bf16_optimizer": "BF16_Optimizer",
    "runtime.comm": "",
    "runtime.comm.coalesced_collectives": "all_to_all_quant_reduce reduce_scatter_coalesced",
    "runtime.compiler": "disable is_compile_supported is_compiling",
    "runtime.config": """
        ADAGRAD_OPTIMIZER ADAMW_OPTIMIZER ADAM_OPTIMIZER DEEPSPEED_OPTIMIZERS DeepSpeedConfig
        DeepSpeedConfigError LAMB_OPTIMIZER LION_OPTIMIZER MUON_OPTIMIZER""",
    "runtime.config_utils": "DeepSpeedConfigModel",
    "runtime.constants": """
        BF16 COMMUNICATION_DATA_TYPE DISABLE_ALLGATHER DUMP_STATE FP16 GRADIENT_ACCUMULATION_STEPS
        GRADIENT_CLIPPING GRADIENT_PREDIVIDE_FACTOR MAX_GRAD_NORM OPTIMIZER OPTIMIZER_PARAMS
        PRESCALE_GRADIENTS ROUTE_ENCODE ROUTE_EVAL ROUTE_PREDICT ROUTE_TRAIN SCHEDULER SCHEDULER_PARAMS
        SPARSE_GRADIENTS STEPS_PER_PRINT TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU TYPE
        WALL_CLOCK_BREAKDOWN ZERO_ALLOW_UNTESTED_OPTIMIZER ZERO_FORCE_DS_CPU_OPTIMIZER""",
    "runtime.data_pipeline": "",
    "runtime.data_pipeline.curriculum_scheduler": "CurriculumScheduler",
    "runtime.data_pipeline.data_routing": "",
    "runtime.data_pipeline.data_routing.helper": (
        "convert_to_random_ltd remove_random_ltd_state_dict save_without_random_ltd"
    ),
    "runtime.data_pipeline.data_routing.scheduler": "RandomLTDScheduler",
    "runtime.data_pipeline.data_sampling": "",
    "runtime.data_pipeline.data_sampling.data_analyzer": "DataAnalyzer DistributedDataAnalyzer",
    "runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": (
        "VariableBatchSizeLR batch_by_seqlens get_dataloader_and_lr_scheduler_for_variable_batch_size"
        " get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed scale_lr"
    ),
    "runtime.dataloader": "DeepSpeedDataLoader RepeatingLoader",
    "runtime.engine": "DeepSpeedEngine DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
    "runtime.entry": """
        DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable default_inference_config init_inference
        initialize set_autotp_mode tp_model_init""",
    "runtime.fp16": "",
    "runtime.fp16.fused_optimizer": "FP16_Optimizer",
    "runtime.fp16.loss_scaler": "DynamicLossScaler LossScaler LossScalerBase",
    "runtime.fp16.onebit": "OnebitAdam OnebitLamb ZeroOneAdam",
    "runtime.fp16.onebit.adam": "OnebitAdam",
    "runtime.fp16.onebit.lamb": "OnebitLamb",
    "runtime.fp16.onebit.zoadam": "ZeroOneAdam",
    "runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
    "runtime.hybrid_engine": "DeepSpeedHybridEngine",
    "runtime.lr_schedules": """
        COS_MIN_RATIO CYCLE_FIRST_STAIR_COUNT CYCLE_FIRST_STEP_SIZE CYCLE_MAX_LR CYCLE_MAX_MOM CYCLE_MIN_LR
        CYCLE_MIN_MOM CYCLE_SECOND_STAIR_COUNT CYCLE_SECOND_STEP_SIZE DECAY_LR_RATE DECAY_MOM_RATE
        DECAY_STEP_SIZE LRRangeTest LR_RANGE_TEST LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STAIRCASE
        LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE ONE_CYCLE OneCycle TOTAL_NUM_STEPS VALID_LR_SCHEDULES
        WARMUP_COSINE_LR WARMUP_DECAY_LR WARMUP_LINEAR_RATE WARMUP_LOG_RATE WARMUP_LR WARMUP_MAX_LR
        WARMUP_MIN_LR WARMUP_MIN_RATIO WARMUP_NUM_STEPS WARMUP_TYPE WarmupCosineLR WarmupDecayLR WarmupLR
        CYCLE_MOMENTUM EDGE_VALUE LR_SCHEDULE MID_VALUE add_tuning_arguments get_torch_optimizer""",
    "runtime.pipe": "LayerSpec PipelineModule ProcessTopology TiedLayerSpec",
    "runtime.pipe.engine": "PipelineEngine",
    "runtime.pipe.module": "LayerSpec PipelineError PipelineModule TiedLayerSpec",
    "runtime.pipe.schedule": """
        BackwardPass BufferOpInstruction DataParallelSchedule ForwardPass InferenceSchedule LoadMicroBatch
        OptimizerStep PipeInstruction PipeSchedule RecvActivation RecvGrad ReduceGrads ReduceTiedGrads
        SendActivation SendGrad TrainSchedule""",
    "runtime.pipe.topology": """
        PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid ProcessTopology""",
    "runtime.precision_config": "DeepSpeedBF16Config DeepSpeedFP16Config",
    "runtime.progressive_layer_drop": "ProgressiveLayerDrop",
    "runtime.rollout": """
        HybridEngineRollout RolloutBatch RolloutConfig RolloutEngine RolloutRequest SamplingConfig build_rollout
        JSDLossOutput ResponseTokenBatch generalized_jsd_loss""",
    "runtime.sequence_parallel": "",
    "runtime.sequence_parallel.parallel_state_sp": """
        get_sequence_data_parallel_group get_sequence_data_parallel_rank get_sequence_data_parallel_world_size
        get_sequence_parallel_group get_sequence_parallel_rank get_sequence_parallel_world_size
        initialize_sequence_parallel""",
    "runtime.sequence_parallel.ulysses_sp": """
        SequenceTiledCompute TiledFusedLogitsLoss TiledMLP UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter
        sequence_tiled_compute""",
    "runtime.sparse_tensor": "SparseTensor",
    "runtime.swap_tensor": "MIN_SWAPPABLE_BYTES",
    "runtime.utils": """
        DummyOptim PartitionedTensor clip_grad_norm_ empty_cache get_accelerator get_global_norm get_grad_norm
        move_to_device partition_balanced partition_uniform see_memory_usage set_random_seed""",
    "runtime.zero": """
        DeepSpeedTensorOverride DeepSpeedZeRoOffload GatheredParameters Init MiCS_Init TiledLinear
        TiledLinearReturnBias ZeroParamStatus ZeroParamType register_external_parameter
        unregister_external_parameter unwrap_model_for_generation""",
    "runtime.zero.config": """
        DeepSpeedZeroConfig DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig
        OffloadDeviceEnum ZeroStageEnum""",
    "runtime.zero.leaf_module_config": "DeepSpeedZeroLeafModuleConfig",
    "runtime.zero.linear": "LinearModuleForZeroStage3 zero3_linear_wrap",
    "runtime.zero.mics": "MiCS_Init",
    "runtime.zero.offload_config": """
        DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum
        OffloadStateTypeEnum""",
    "runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
    "runtime.zero.partition_parameters": """
        DEFAULT_TENSOR_OVERRIDES DeepSpeedTensorOverride GatheredParameters Init ZeroParamStatus ZeroParamType
        get_accelerator is_zero_param register_external_parameter unregister_external_parameter
        zero_wrapper_for_fp_tensor_constructor""",
    "runtime.zero.stage3": """
        DeepSpeedZeroOptimizer_Stage3 estimate_zero3_model_states_mem_needs
        estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live
        unwrap_model_for_generation""",
    "runtime.zero.stage_1_and_2": """
        DeepSpeedZeroOptimizer estimate_zero2_model_states_mem_needs
        estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live""",
    "runtime.zero.tiling": "TiledLinear TiledLinearReturnBias",
    "runtime.zero.utils": "ZeRORuntimeException is_zero_param is_zero_supported_optimizer",
    "sequence": "",
    "sequence.auto_sp": "auto_wrap_model_for_sp",
    "sequence.cross_entropy": "vocab_parallel_cross_entropy vocab_sequence_parallel_cross_entropy",
    "sequence.fpdt_layer": "FPDT_Attention FPDT_FFN FPDT_InputConstruct FPDT_LogitsLoss",
    "sequence.layer": "DistributedAttention single_all_to_all",
    "utils": """
        OnDevice RepeatingLoader get_caller_func get_data_parallel_group get_data_parallel_rank
        get_data_parallel_world_size get_model_parallel_group get_model_parallel_rank get_model_parallel_world_size
        get_tensor_model_parallel_group get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank
        get_tensor_model_parallel_world_size initialize get_z3_leaf_modules groups instrument_w_nvtx log_dist
        log_dist_once logger safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state
        safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param
        safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad
        safe_set_local_optimizer_state safe_update_full_grad_vectorized set_log_level_from_string
        set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix
        unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter""",
    "utils.comms_logging": "calc_bw_log convert_size get_caller_func",
    "utils.groups": """
        get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_group
        get_model_parallel_rank get_model_parallel_world_size get_tensor_model_parallel_group
        get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size
        initialize""",
    "utils.init_on_device": "OnDevice",
    "utils.logging": "log_dist log_dist_once log_levels logger set_log_level_from_string warning_once",
    "utils.nvtx": "instrument_w_nvtx",
    "utils.tensor_fragment": """
        safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param
        safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad
        safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad
        safe_set_local_optimizer_state safe_update_full_grad_vectorized""",
    "utils.timer": """
        BACKWARD_GLOBAL_TIMER BACKWARD_MICRO_TIMER FORWARD_GLOBAL_TIMER FORWARD_MICRO_TIMER STEP_GLOBAL_TIMER
        STEP_MICRO_TIMER SynchronizedWallClockTimer ThroughputTimer get_accelerator logger""",
    "utils.torch": "register_grad_hook required_torch_version",
    "utils.z3_leaf_module": """
        get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name
        set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter""",
    "utils.zero_to_fp32": """
        convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict
        get_fp32_state_dict_from_zero_checkpoint get_model_state_file get_model_state_files get_optim_files
        load_state_dict_from_zero_checkpoint main""",
    "utils.zero_to_torch": "main",
}
# What ``import deepspeed`` makes reachable as an attribute, without an import of its own.
REACHABLE = """
    accelerator accelerator.abstract_accelerator accelerator.real_accelerator comm comm.comm monitor monitor.config ops
    ops.adagrad ops.adagrad.cpu_adagrad ops.adam ops.adam.cpu_adam ops.adam.fused_adam ops.lamb ops.lamb.fused_lamb
    ops.lion ops.lion.cpu_lion ops.lion.fused_lion ops.op_builder ops.op_builder.all_ops runtime
    runtime.activation_checkpointing runtime.activation_checkpointing.checkpointing runtime.base_optimizer
    runtime.compiler runtime.config runtime.dataloader runtime.engine runtime.entry runtime.hybrid_engine
    runtime.lr_schedules runtime.pipe runtime.pipe.engine runtime.pipe.module runtime.pipe.topology runtime.utils
    runtime.zero runtime.zero.mics runtime.zero.parameter_offload runtime.zero.partition_parameters runtime.zero.stage3
    runtime.zero.tiling utils utils.comms_logging utils.groups utils.init_on_device utils.logging utils.nvtx
    utils.tensor_fragment utils.timer"""
# The modules that ``import deepspeed`` makes; every other one waits until it is asked for.
LOADED = "comm runtime runtime.zero utils utils.groups utils.z3_leaf_module"


@pytest.fixture
def deepspeed_alias() -> Iterator[None]:
    finder.install(children=False)
    yield
    finder.uninstall()


def in_a_new_process(program: str, *arguments: str) -> Any:
    """What a new interpreter prints as JSON on its last line."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=env, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.usefixtures("deepspeed_alias")
@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_its_names_under_both_paths(name: str) -> None:
    path = f".{name}" if name else ""
    module = importlib.import_module(f"deepspeed{path}")
    assert module is importlib.import_module(TARGET + path)
    assert [each for each in MODULES[name].split() if not hasattr(module, each)] == []
    assert [each for each in MODULES[name].split() if each not in dir(module)] == []
    if hasattr(module, "__all__"):
        assert sorted(module.__all__) == sorted(MODULES[name].split())


@pytest.mark.usefixtures("deepspeed_alias")
@pytest.mark.parametrize("name", sorted({*EXPORTS, *ABSENT}))
def test_a_module_without_a_file_looks_like_one_with_a_file(name: str) -> None:
    module = importlib.import_module(f"{TARGET}.{name}")
    assert module.__name__ == f"{TARGET}.{name}"
    assert module.__spec__ is not None and module.__spec__.name == f"{TARGET}.{name}"
    assert module.__file__ is not None and Path(module.__file__).is_file()
    assert module.__doc__ is not None and module.__doc__.startswith(f"``deepspeed.{name}``")
    has_submodules = any(other.startswith(name + ".") for other in (*EXPORTS, *ABSENT))
    is_package = hasattr(module, "__path__")
    assert is_package or not has_submodules
    assert module.__package__ == module.__name__ if is_package else module.__name__.rpartition(".")[0]
    above, _, last = f"deepspeed.{name}".rpartition(".")
    # A function of deepspeed.utils has the name of the module that defines it, as in DeepSpeed.
    assert getattr(importlib.import_module(above), last) is module or name == "utils.z3_leaf_module"


def test_every_module_is_a_file_or_an_entry_and_not_both() -> None:
    files = {
        found.name.removeprefix(TARGET + ".")
        for found in pkgutil.walk_packages(shoal.compat.deepspeed.__path__, TARGET + ".")
        if not found.name.endswith("__main__")
    }
    entries = {*EXPORTS, *ABSENT}
    assert files & entries == set()
    assert set(MODULES) - {""} == files | set(EXPORTS) | (set(MODULES) & set(ABSENT))
    above = {name.rpartition(".")[0] for name in entries} - {""}
    assert above - files - entries == set()
    assert set(PROGRAMS) <= set(EXPORTS)


def test_importing_deepspeed_makes_the_modules_that_it_needs_and_no_other() -> None:
    program = (
        "import json, sys, shoal.compat.finder as f; f.install(children=False); import deepspeed; print(json.dumps("
        "sorted(n for n in sys.modules if n.startswith('shoal.compat.deepspeed.'))))"
    )
    assert in_a_new_process(program) == sorted(f"{TARGET}.{name}" for name in LOADED.split())


def test_submodules_are_reachable_as_attributes_without_an_import() -> None:
    program = (
        "import functools, json, sys, shoal.compat.finder as f; f.install(children=False); import deepspeed\n"
        "found = [functools.reduce(getattr, n.split('.'), deepspeed).__name__ for n in sys.argv[1].split()]\n"
        "print(json.dumps(found))"
    )
    assert in_a_new_process(program, REACHABLE) == [f"{TARGET}.{name}" for name in REACHABLE.split()]


def test_threads_that_import_at_the_same_time_get_complete_modules() -> None:
    program = """
import importlib, json, random, sys, threading
import shoal.compat.finder as f
f.install(children=False)
modules, wrong = json.loads(sys.argv[1]), []
start = threading.Barrier(8)
def load(seed):
    names = list(modules)
    random.Random(seed).shuffle(names)
    for above in ("deepspeed", "shoal.compat.deepspeed"):
        start.wait()
        for name in names:
            try:
                module = importlib.import_module(f"{above}.{name}" if name else above)
                wrong.extend(f"{name}.{each}" for each in modules[name].split() if not hasattr(module, each))
            except BaseException as error:
                wrong.append(f"{name}: {error!r}")
threads = [threading.Thread(target=load, args=(seed,)) for seed in range(8)]
sys.setswitchinterval(1e-5)
for thread in threads: thread.start()
for thread in threads: thread.join()
wrong += [n for n in modules if n and sys.modules["deepspeed." + n] is not sys.modules["shoal.compat.deepspeed." + n]]
print(json.dumps(wrong))
"""
    assert in_a_new_process(program, json.dumps(MODULES)) == []


@pytest.mark.usefixtures("deepspeed_alias")
def test_reload_binds_the_names_of_a_table_entry_again() -> None:
    from deepspeed.ops import adam

    whole, adam.FusedAdam = adam.FusedAdam, None
    assert importlib.reload(adam) is adam
    assert adam.FusedAdam is whole


@pytest.mark.usefixtures("deepspeed_alias")
@pytest.mark.parametrize(
    "path",
    [
        "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
        "deepspeed.ops.lamb.fused_lamb.FusedLamb",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.utils.ZeRORuntimeException",
        "deepspeed.ops.op_builder.CPUAdamBuilder",
        f"{TARGET}.ops.adam.cpu_adam.DeepSpeedCPUAdam",
        f"{TARGET}.runtime.fp16.fused_optimizer.FP16_Optimizer",
        f"{TARGET}.runtime.pipe.module.PipelineModule",
    ],
)
def test_a_class_is_pickled_by_name_and_found_by_its_older_path(path: str) -> None:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert pickle.loads(f"c{module}\n{name}\n.".encode()) is found  # noqa: S301 - the bytes are made on this line
    assert pickle.loads(pickle.dumps(found)) is found  # noqa: S301 - made on this line


@pytest.mark.usefixtures("deepspeed_alias")
def test_a_package_without_a_file_has_no_submodule_but_its_own() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'deepspeed\.sequence\.nothing'"):
        importlib.import_module("deepspeed.sequence.nothing")
    assert importlib.util.find_spec("deepspeed.ops.nothing") is None
    assert not hasattr(importlib.import_module("deepspeed.ops"), "nothing")
    assert not hasattr(importlib.import_module("deepspeed.comm"), "constants")  # an import of it is an error


@pytest.mark.parametrize(
    ("name", "above"), list(zip(sorted(PROGRAMS.keys() - {"env_report"}), itertools.cycle(["deepspeed", TARGET])))
)
def test_a_module_of_programs_runs_with_m(name: str, above: str) -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", TARGET, "-m", f"{above}.{name}", "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr
