"""Every public name of DeepSpeed's that scripts touch is there; what is not built says so when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from shoal.compat import finder
from shoal.compat.absent import ABSENT, NAMED, AbsentModuleError
from shoal.errors import NotBuiltError

# What is done: module -> names. Left out: everything below.
THERE = {
    "deepspeed": """
        initialize init_distributed add_config_arguments add_tuning_arguments tp_model_init set_autotp_mode
        OnDevice DeepSpeedEngine DeepSpeedOptimizer DeepSpeedConfig DeepSpeedConfigError DeepSpeedDataLoader
        checkpointing zero comm dist ops moe pipe utils accelerator runtime __version__ version get_accelerator
        log_dist logger is_compile_supported DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable""",
    "deepspeed.accelerator": "get_accelerator set_accelerator DeepSpeedAccelerator",
    "deepspeed.accelerator.real_accelerator": "get_accelerator set_accelerator",
    "deepspeed.checkpoint.utils": "clone_tensors_for_torch_save",
    "deepspeed.comm": """
        init_distributed is_initialized destroy_process_group new_group barrier monitored_barrier broadcast
        broadcast_object_list all_reduce all_reduce_coalesced inference_all_reduce reduce all_gather
        all_gather_object all_gather_into_tensor all_gather_coalesced allgather_fn reduce_scatter
        reduce_scatter_tensor reduce_scatter_fn all_to_all all_to_all_single send recv isend irecv gather
        scatter get_rank get_world_size get_local_rank get_global_rank get_all_ranks_from_group get_world_group
        initialize_mesh_device ReduceOp configure log_summary reset_log mpi_discovery P2POp ProcessGroup
        is_available batch_isend_irecv""",
    "deepspeed.comm.comm": "all_reduce init_distributed",
    "deepspeed.comm.reduce_op": "ReduceOp",
    "deepspeed.constants": "TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",
    "deepspeed.env_report": "main cli_main",
    "deepspeed.git_version_info": "version git_hash git_branch installed_ops compatible_ops torch_info",
    "deepspeed.launcher.runner": """
        DEEPSPEED_ENVIRONMENT_NAME main parse_args fetch_hostfile parse_resource_filter
        parse_inclusion_exclusion""",
    "deepspeed.launcher.constants": "PDSH_LAUNCHER OPENMPI_LAUNCHER SLURM_LAUNCHER",
    "deepspeed.moe.experts": "Experts",
    "deepspeed.moe.layer": "MoE",
    "deepspeed.moe.mappings": "gather_tokens drop_tokens",
    "deepspeed.moe.sharded_moe": "TopKGate MOELayer top1gating top2gating topkgating",
    "deepspeed.moe.utils": """
        split_params_into_shared_and_expert_params
        has_moe_layers is_moe_param split_params_into_different_moe_groups_for_optimizer
        configure_moe_param_groups is_moe_param_group""",
    "deepspeed.monitor.monitor": "MonitorMaster Monitor",
    "deepspeed.monitor.config": """
        get_monitor_config DeepSpeedMonitorConfig TensorBoardConfig CSVConfig WandbConfig CometConfig""",
    "deepspeed.ops": "__compatible_ops__ adam adagrad lamb lion",
    "deepspeed.ops.adagrad": "DeepSpeedCPUAdagrad",
    "deepspeed.ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "deepspeed.ops.adam.cpu_adam": "DeepSpeedCPUAdam",
    "deepspeed.ops.adam.fused_adam": "FusedAdam",
    "deepspeed.ops.aio": "AsyncIOBuilder",
    "deepspeed.ops.lamb": "FusedLamb",
    "deepspeed.ops.lion": "DeepSpeedCPULion FusedLion",
    "deepspeed.runtime.fp16.onebit": "OnebitAdam OnebitLamb ZeroOneAdam",
    "deepspeed.runtime.fp16.onebit.adam": "OnebitAdam",
    "deepspeed.runtime.fp16.onebit.lamb": "OnebitLamb",
    "deepspeed.runtime.fp16.onebit.zoadam": "ZeroOneAdam",
    "deepspeed.ops.op_builder": """
        CPUAdamBuilder CPUAdagradBuilder CPULionBuilder FusedAdamBuilder FusedLambBuilder FusedLionBuilder
        AsyncIOBuilder GDSBuilder UtilsBuilder InferenceBuilder TransformerBuilder QuantizerBuilder
        RandomLTDBuilder SparseAttnBuilder OpBuilder""",
    "deepspeed.ops.op_builder.all_ops": "ALL_OPS",
    "deepspeed.runtime.activation_checkpointing.checkpointing": """
        configure checkpoint non_reentrant_checkpoint is_configured reset get_cuda_rng_tracker
        model_parallel_cuda_manual_seed set_num_layers CudaRNGStatesTracker""",
    "deepspeed.runtime.base_optimizer": "DeepSpeedOptimizer ZeROOptimizer",
    "deepspeed.runtime.bf16_optimizer": "BF16_Optimizer",
    "deepspeed.runtime.compiler": "is_compile_supported disable is_compiling",
    "deepspeed.runtime.config": "DeepSpeedConfig DeepSpeedConfigError ADAM_OPTIMIZER DEEPSPEED_OPTIMIZERS",
    "deepspeed.runtime.constants": "ROUTE_TRAIN GRADIENT_ACCUMULATION_STEPS TRAIN_BATCH_SIZE",
    "deepspeed.runtime.dataloader": "DeepSpeedDataLoader RepeatingLoader",
    "deepspeed.runtime.engine": "DeepSpeedEngine DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
    "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "deepspeed.runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
    "deepspeed.runtime.lr_schedules": """
        WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest VALID_LR_SCHEDULES add_tuning_arguments
        WARMUP_LR LR_RANGE_TEST ONE_CYCLE WARMUP_DECAY_LR WARMUP_COSINE_LR""",
    "deepspeed.runtime.precision_config": "DeepSpeedFP16Config DeepSpeedBF16Config",
    "deepspeed.runtime.swap_tensor": "MIN_SWAPPABLE_BYTES",
    "deepspeed.runtime.utils": """
        see_memory_usage move_to_device set_random_seed clip_grad_norm_ get_global_norm partition_uniform
        partition_balanced DummyOptim""",
    "deepspeed.runtime.zero": """
        Init GatheredParameters register_external_parameter unregister_external_parameter
        unwrap_model_for_generation DeepSpeedZeRoOffload
        ZeroParamStatus ZeroParamType DeepSpeedTensorOverride MiCS_Init TiledLinear TiledLinearReturnBias""",
    "deepspeed.runtime.zero.config": """
        ZeroStageEnum DeepSpeedZeroConfig OffloadDeviceEnum DeepSpeedZeroOffloadParamConfig
        DeepSpeedZeroOffloadOptimizerConfig""",
    "deepspeed.runtime.zero.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum",
    "deepspeed.runtime.zero.partition_parameters": """
        Init GatheredParameters ZeroParamStatus ZeroParamType get_accelerator
        zero_wrapper_for_fp_tensor_constructor _orig_torch_arange _orig_torch_empty register_external_parameter""",
    "deepspeed.runtime.zero.stage3": """
        DeepSpeedZeroOptimizer_Stage3 estimate_zero3_model_states_mem_needs_all_live
        estimate_zero3_model_states_mem_needs_all_cold unwrap_model_for_generation""",
    "deepspeed.elasticity": """
        compute_elastic_config elasticity_enabled ElasticityError
        ElasticityConfigError ElasticityIncompatibleWorldSize""",
    "deepspeed.elasticity.config": """
        ElasticityError ElasticityConfigError ElasticityIncompatibleWorldSize""",
    "deepspeed.elasticity.elasticity": "compute_elastic_config elasticity_enabled",
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": "CurriculumScheduler",
    "deepspeed.runtime.data_pipeline.data_routing.helper": "convert_to_random_ltd",
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": "DataAnalyzer",
    "deepspeed.runtime.pipe": "PipelineModule LayerSpec TiedLayerSpec ProcessTopology",
    "deepspeed.runtime.pipe.engine": "PipelineEngine",
    "deepspeed.runtime.progressive_layer_drop": "ProgressiveLayerDrop",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": """
        initialize_sequence_parallel get_sequence_parallel_group get_sequence_parallel_world_size
        get_sequence_parallel_rank""",
    "deepspeed.runtime.sequence_parallel.ulysses_sp": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
    "deepspeed.runtime.zero.stage_1_and_2": """
        DeepSpeedZeroOptimizer estimate_zero2_model_states_mem_needs_all_live
        estimate_zero2_model_states_mem_needs_all_cold""",
    "deepspeed.runtime.zero.utils": "is_zero_param is_zero_supported_optimizer",
    "deepspeed.sequence.layer": "DistributedAttention",
    "deepspeed.utils": """
        logger log_dist groups OnDevice RepeatingLoader instrument_w_nvtx get_caller_func
        safe_get_full_fp32_param safe_set_full_fp32_param safe_get_full_optimizer_state
        safe_set_full_optimizer_state safe_get_full_grad safe_set_full_grad safe_get_local_grad
        safe_get_local_fp32_param safe_get_local_optimizer_state safe_set_local_grad safe_set_local_fp32_param
        safe_set_local_optimizer_state safe_update_full_grad_vectorized set_z3_leaf_modules
        unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module set_z3_leaf_module set_z3_leaf_modules_by_name
        set_z3_leaf_modules_by_suffix""",
    "deepspeed.utils.groups": """
        _get_data_parallel_group _get_data_parallel_world_size _get_data_parallel_rank
        _get_sequence_parallel_group _get_sequence_parallel_world_size _get_sequence_parallel_rank
        _get_sequence_data_parallel_group _get_sequence_data_parallel_world_size
        _get_sequence_data_parallel_rank _get_expert_parallel_group _get_expert_data_parallel_group
        _get_expert_parallel_world_size _get_expert_parallel_rank _get_expert_parallel_src_rank
        _get_expert_data_parallel_world_size _get_expert_data_parallel_rank _get_expert_broadcast_src_rank
        _get_expert_parallel_group_dict _get_expert_data_parallel_group_dict _get_expert_parallel_group_ranks
        _get_expert_data_parallel_group_ranks _get_max_expert_size _get_max_expert_size_name
        _get_max_expert_parallel_group _get_expert_model_parallel_world_size
        get_tensor_model_parallel_group get_tensor_model_parallel_world_size get_tensor_model_parallel_rank
        get_model_parallel_group get_model_parallel_world_size get_model_parallel_rank get_data_parallel_group
        get_data_parallel_world_size get_data_parallel_rank initialize""",
    "deepspeed.utils.logging": "logger log_dist set_log_level_from_string",
    "deepspeed.utils.tensor_fragment": "safe_get_full_fp32_param",
    "deepspeed.utils.timer": "SynchronizedWallClockTimer",
    "deepspeed.utils.torch": "required_torch_version",
    "deepspeed.utils.z3_leaf_module": "set_z3_leaf_modules z3_leaf_module",
    "deepspeed.utils.zero_to_fp32": """
        get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict
        load_state_dict_from_zero_checkpoint get_model_state_file get_optim_files""",
}

# What is importable, and raises NotBuiltError by name when it is used.
NOT_THERE = {
    "deepspeed": """
        init_inference default_inference_config InferenceEngine
        DeepSpeedHybridEngine DeepSpeedTransformerLayer DeepSpeedTransformerConfig replace_transformer_layer
        revert_transformer_layer""",
    "deepspeed.autotuning": "Autotuner",
    "deepspeed.compression.compress": "init_compression redundancy_clean student_initialization",
    "deepspeed.elasticity": "DSElasticAgent",
    "deepspeed.inference.engine": "InferenceEngine",
    "deepspeed.linear": "OptimizedLinear LoRAConfig QuantizationConfig",
    "deepspeed.ops.sparse_attention": "SparseSelfAttention",
    "deepspeed.ops.transformer": "DeepSpeedTransformerLayer DeepSpeedTransformerConfig",
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": "DeepSpeedDataSampler",
    "deepspeed.runtime.hybrid_engine": "DeepSpeedHybridEngine",
    "deepspeed.sequence.auto_sp": "auto_wrap_model_for_sp",
    "deepspeed.sequence.cross_entropy": "vocab_parallel_cross_entropy",
    "deepspeed.sequence.fpdt_layer": "FPDT_Attention",
}


# What a module has beside its absent names.
THERE_TOO = {
    "runtime.sequence_parallel.ulysses_sp": {
        "SequenceTiledCompute",
        "TiledFusedLogitsLoss",
        "TiledMLP",
        "UlyssesSPAttentionHF",
        "UlyssesSPDataLoaderAdapter",
        "sequence_tiled_compute",
    },
    "sequence.cross_entropy": {"vocab_sequence_parallel_cross_entropy"},
    "sequence.layer": {"DistributedAttention"},
}


@pytest.fixture(autouse=True)
def deepspeed_alias() -> Iterator[None]:
    finder.install(children=False)
    yield
    finder.uninstall()


@pytest.mark.parametrize("module", THERE)
def test_every_name_of_a_module_is_there(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in THERE[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("module", NOT_THERE)
def test_names_that_are_not_built_are_importable_and_say_what_to_do_when_used(module: str) -> None:
    found = importlib.import_module(module)
    for name in NOT_THERE[module].split():
        with pytest.raises(NotBuiltError, match=rf"\[deepspeed-part\] .*{name} is not a part of Shoal(.|\n)*do: "):
            getattr(found, name)()


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_a_listed_module_without_counterpart_is_imported_with_its_names(name: str) -> None:
    found = importlib.import_module(f"deepspeed.{name}")
    assert set(ABSENT[name][1].split()) == set(found.__all__) - THERE_TOO.get(name, set())
    for each in ABSENT[name][1].split():
        with pytest.raises(NotBuiltError, match=rf"\[deepspeed-part\] deepspeed\.{name}\.{each} is not (.|\n)*do: "):
            getattr(found, each)()


def test_a_module_below_a_listed_one_cannot_be_imported_and_says_what_to_do() -> None:
    with pytest.raises(AbsentModuleError, match="use a server of models"):
        importlib.import_module("deepspeed.inference.v2.kernels.ragged_ops")
    with pytest.raises(ModuleNotFoundError):  # what code that tries an import catches
        importlib.import_module("deepspeed.ops.sparse_attention.matmul")


@pytest.mark.parametrize("name", sorted(name for names in NAMED.values() for name in names.split()))
def test_a_module_without_replacement_says_what_to_do(name: str) -> None:
    with pytest.raises(AbsentModuleError, match=rf"deepspeed\.{name} is not a part of Shoal") as found:
        importlib.import_module(f"deepspeed.{name}")
    assert isinstance(found.value, ModuleNotFoundError)
    assert "do: " in str(found.value)


def test_a_module_that_nobody_knows_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'deepspeed\.nothing'"):
        importlib.import_module("deepspeed.nothing")


def test_a_class_that_is_not_built_can_be_a_base_and_has_no_instances() -> None:
    from deepspeed.linear import OptimizedLinear

    class Model(OptimizedLinear): ...

    assert not isinstance(object(), OptimizedLinear)
    with pytest.raises(NotBuiltError, match="OptimizedLinear, the base of Model, is not a part"):
        Model(hidden_size=1)


def test_checkpointing_is_an_attribute_of_the_package() -> None:
    import deepspeed

    assert deepspeed.checkpointing.configure is deepspeed.runtime.activation_checkpointing.checkpointing.configure
