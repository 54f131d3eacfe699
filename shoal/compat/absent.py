"""What DeepSpeed has and Shoal does not, by module, with what to use instead.

    in the table       importing it              using it
    a name             works                     raises NotBuiltError
    a module           works (``ABSENT``)        its names raise NotBuiltError
    a module           raises AbsentModuleError: in ``NAMED``, or below a module of ``ABSENT`` and in no table

``shoal.compat.table_finder`` makes the modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.errors import NotBuiltError

SERVING = "use a server of models such as vLLM; or shoal.load_hf and generate() of transformers."
KERNELS = "use torch.nn's layers, with torch.compile() or torch.nn.attention; no kernels are injected."
_SPARSE = "use torch.nn.attention.flex_attention in the model."
_COMPRESSION = "use torchao for quantization and pruning, before or after training."
_PLANNING = "start the script by `shoal deepspeed --autotuning tune` or `shoal run --autotuning tune`."
_ENCODED = "the engine encodes what it sends: name OneBitAdam, or formats in the section wire of the config."
_DATA = (
    "initialize(training_data=...) samples as data_efficiency.data_sampling says; shoal.data.metric_files reads files."
)
_LTD = "the config section data_efficiency.data_routing.random_ltd wraps the layers that it lists."
_DISK = "set zero_optimization.offload_optimizer.device to nvme; Shoal's disk tier reads and writes by itself."
_SAVING = "call engine.save_checkpoint(); checkpoint.async_save in the config saves while training continues."
_TENSOR = "train with ZeRO stage 3, which needs no change of the model."
_OFFLOAD = "set zero_optimization.offload_optimizer.device to cpu."
_ZENFLOW = "set zero_optimization.zenflow, with offload_optimizer on the cpu."
_LINEAR = "use torch.nn.Linear, and PEFT for LoRA: its adapters train under every stage."
_MUON = "name Muon as optimizer.type in the config."
_STAGES = "Shoal runs any schedule through initialize() and train_batch(); this is a part of DeepSpeed's own runtime."
_EXPERTS = "use deepspeed.moe.layer.MoE, or the section expert_parallel in the config for a model of Transformers."
_SEQUENCE = "use DistributedAttention or UlyssesSPAttentionHF for attention, and activation checkpointing for the rest."
_BACKENDS = "use torch.distributed, or deepspeed.comm's functions."
_HYBRID = "train with deepspeed.initialize(), and generate inside deepspeed.zero.unwrap_model_for_generation(engine)."
_ELASTIC = (
    "start the job by `shoal deepspeed --elastic_training`: TorchElastic's agent restarts the ranks, and a"
    " checkpoint loads on any number of them."
)
_LAUNCHER = "start ranks by `shoal deepspeed`, `shoal run` or torchrun."
_SWAPPING = "set zero_optimization.offload_param or offload_optimizer in the config: Shoal moves state by itself."
_CHECKPOINTS = "load it as it is: engine.load_checkpoint() and `shoal convert` read DeepSpeed's own, in any layout."

# Name below ``deepspeed``: what to do instead, and the names in it. Capitals begin classes.
ABSENT: dict[str, tuple[str, str]] = {
    "inference": (
        SERVING,
        "InferenceEngine InferenceEngineV2 RaggedInferenceEngineConfig DeepSpeedTPConfig build_hf_engine",
    ),
    "inference.config": (
        SERVING,
        "DeepSpeedInferenceConfig DeepSpeedTPConfig DeepSpeedMoEConfig QuantizationConfig DtypeEnum",
    ),
    "inference.engine": (SERVING, "InferenceEngine"),
    "inference.v2": (
        SERVING,
        "InferenceEngineV2 RaggedInferenceEngineConfig build_hf_engine build_engine_from_ds_checkpoint",
    ),
    "inference.v2.engine_v2": (SERVING, "InferenceEngineV2"),
    "inference.v2.engine_factory": (SERVING, "build_hf_engine build_engine_from_ds_checkpoint"),
    "inference.v2.config_v2": (SERVING, "RaggedInferenceEngineConfig"),
    "inference.quantization": (SERVING, ""),
    "module_inject": (
        KERNELS,
        "replace_transformer_layer revert_transformer_layer ReplaceWithTensorSlicing GroupQuantizer generic_injection"
        " LinearAllreduce LinearLayer EmbeddingLayer Normalize HFBertLayerPolicy DSPolicy",
    ),
    "module_inject.layers": (_TENSOR, "LinearAllreduce LinearLayer EmbeddingLayer Normalize"),
    "module_inject.auto_tp": (_TENSOR, "AutoTP ReplaceWithTensorSlicing"),
    "module_inject.replace_module": (KERNELS, "replace_transformer_layer revert_transformer_layer"),
    "module_inject.replace_policy": (KERNELS, "HFBertLayerPolicy DSPolicy"),
    "module_inject.inject": (KERNELS, "module_inject"),
    "model_implementations": (SERVING, "DeepSpeedTransformerInference DeepSpeedInferenceConfig"),
    "ops.transformer": (
        KERNELS,
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig DeepSpeedTransformerInference DeepSpeedInferenceConfig",
    ),
    "ops.transformer.transformer": (KERNELS, "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"),
    "ops.transformer.inference": (SERVING, "DeepSpeedTransformerInference DeepSpeedInferenceConfig"),
    "ops.sparse_attention": (
        _SPARSE,
        "SparseSelfAttention BertSparseSelfAttention SparseAttentionUtils SparsityConfig DenseSparsityConfig"
        " FixedSparsityConfig VariableSparsityConfig BigBirdSparsityConfig BSLongformerSparsityConfig",
    ),
    "ops.deepspeed4science": (KERNELS, "DS4Sci_EvoformerAttention"),
    "ops.quantizer": (_COMPRESSION, "ds_quantizer"),
    "ops.fp_quantizer": (_COMPRESSION, "FP_Quantize Quantizer matmul_fp8"),
    "ops.random_ltd": (_LTD, "gpt_sample_tokens bert_sample_tokens GatherTokens ScatterTokens"),
    "ops.random_ltd.dropping_utils": (_LTD, "gpt_sample_tokens bert_sample_tokens GatherTokens ScatterTokens"),
    "ops.gds": (_DISK, ""),
    "ops.adam.zenflow_cpu_adam": (_ZENFLOW, "ZenFlowCPUAdam"),
    "ops.adam.zenflow_torch_adam": (_ZENFLOW, "ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3"),
    "compression": (_COMPRESSION, ""),
    "compression.compress": (_COMPRESSION, "init_compression redundancy_clean student_initialization"),
    "compression.scheduler": (_COMPRESSION, "compression_scheduler"),
    "compression.config": (_COMPRESSION, "get_compression_config"),
    "compression.helper": (_COMPRESSION, "convert_conv1d_to_linear recursive_getattr recursive_setattr"),
    "autotuning": (_PLANNING, "Autotuner"),
    "autotuning.autotuner": (_PLANNING, "Autotuner"),
    "runtime.comm.nccl": (_ENCODED, "NcclBackend"),
    "runtime.comm.compressed": (_ENCODED, "CompressedBackend"),
    "runtime.data_pipeline.data_sampling.data_sampler": (_DATA, "DeepSpeedDataSampler"),
    "runtime.data_pipeline.data_sampling.indexed_dataset": (_DATA, "MMapIndexedDataset MMapIndexedDatasetBuilder"),
    "runtime.data_pipeline.data_routing.basic_layer": (_LTD, "RandomLayerTokenDrop"),
    "runtime.checkpoint_engine": (_SAVING, "TorchCheckpointEngine FastCheckpointEngine DecoupledCheckpointEngine"),
    "runtime.checkpoint_engine.checkpoint_engine": (_SAVING, "CheckpointEngine CheckpointCommitInfo"),
    "runtime.checkpoint_engine.torch_checkpoint_engine": (_SAVING, "TorchCheckpointEngine"),
    "runtime.checkpoint_engine.nebula_checkpoint_engine": (_SAVING, "NebulaCheckpointEngine"),
    "nebula": (_SAVING, ""),
    "nebula.config": (_SAVING, "DeepSpeedNebulaConfig"),
    "datastates": (_SAVING, ""),
    "runtime.model_checkpointing": (_SAVING, ""),
    "runtime.state_dict_factory": (_CHECKPOINTS, "SDLoaderFactory MegatronSDLoader"),
    "runtime.weight_quantizer": (_COMPRESSION, "WeightQuantization"),
    "runtime.quantize": (_COMPRESSION, "Quantizer"),
    "runtime.eigenvalue": (_COMPRESSION, "Eigenvalue"),
    "runtime.tensor_parallel": (_TENSOR, "TpTrainingManager"),
    "runtime.domino": (_TENSOR, ""),
    "runtime.domino.transformer": (_TENSOR, "DominoTransformer DominoTransformerLayer"),
    "runtime.superoffload": (_OFFLOAD, ""),
    "runtime.zenflow": (_ZENFLOW, ""),
    "runtime.rollout": (
        _HYBRID,
        "HybridEngineRollout RolloutBatch RolloutConfig RolloutEngine RolloutRequest SamplingConfig build_rollout"
        " JSDLossOutput ResponseTokenBatch generalized_jsd_loss",
    ),
    "io": (_DISK, ""),
    "nvme": (_DISK, ""),
    "compile": ("use engine.compile(), torch's own compiler.", ""),
    "checkpoint.reshape_utils": (_CHECKPOINTS, "get_files_with_prefix get_zero_files merge_state partition_data"),
    "checkpoint.reshape_meg_2d": (_CHECKPOINTS, "reshape_meg_2d_parallel meg_2d_parallel_map"),
    "checkpoint.reshape_3d_utils": (_CHECKPOINTS, "model_3d_desc get_model_3d_descriptor"),
    "comm.torch": (_BACKENDS, "TorchBackend"),
    "comm.backend": (_BACKENDS, "Backend"),
    "comm.ccl": (_BACKENDS, "CCLBackend"),
    "launcher.launch": (_LAUNCHER, "main parse_args terminate_process_tree"),
    "launcher.multinode_runner": (
        _LAUNCHER,
        "MultiNodeRunner PDSHRunner OpenMPIRunner MPICHRunner IMPIRunner SlurmRunner MVAPICHRunner",
    ),
    "linear.optimized_linear": (_LINEAR, "OptimizedLinear LoRAOptimizedLinear"),
    "linear.config": (_LINEAR, "LoRAConfig QuantizationConfig"),
    "linear.quantization": (_LINEAR, "QuantizedParameter QuantizedLinear"),
    "linear.context_manager": (_LINEAR, "Init init_lora"),
    "moe.ep_router": (_EXPERTS, "TokenChoiceTopKRouter"),
    "moe.ep_experts": (_EXPERTS, "ExpertActivation GroupedExperts"),
    "profiling.config": ("write the section flops_profiler in the config.", "DeepSpeedFlopsProfilerConfig"),
    "runtime.activation_checkpointing.config": (
        "write the section activation_checkpointing in the config.",
        "DeepSpeedActivationCheckpointingConfig",
    ),
    "runtime.chunked_cross_entropy": (
        "compute the loss in chunks under torch.utils.checkpoint.",
        "chunked_cross_entropy ChunkedCausalLMLoss install_chunked_causal_lm_loss",
    ),
    "runtime.pipe.p2p": (_STAGES, "can_send_recv init_process_groups send recv wait send_obj recv_obj"),
    "runtime.pipe.dualpipev": (_STAGES, "DualPipeVModule DualPipeVEngine"),
    "runtime.swap_tensor.partitioned_param_swapper": (
        _SWAPPING,
        "AsyncPartitionedParameterSwapper PartitionedParamStatus",
    ),
    "runtime.swap_tensor.partitioned_optimizer_swapper": (_SWAPPING, "PartitionedOptimizerSwapper"),
    "runtime.swap_tensor.async_swapper": (_SWAPPING, "AsyncTensorSwapper"),
    "runtime.zero.muon": (_MUON, ""),
    "runtime.zero.muon.original_muon": (
        _MUON,
        "Muon SingleDeviceMuon MuonWithAuxAdam SingleDeviceMuonWithAuxAdam muon_update zeropower_via_newtonschulz5",
    ),
    "runtime.zero.muon.muon_optimizer": (_MUON, "MuonWithAuxAdam"),
    "runtime.zero.partitioned_param_coordinator": (
        "read engine.memory_report(): units are gathered and released by their hooks.",
        "PartitionedParameterCoordinator ZeRoTraceMode",
    ),
    "sequence.linear_cross_entropy": (_SEQUENCE, "vocab_parallel_linear_cross_entropy"),
    "sequence.vocab_parallel_ops": (
        _SEQUENCE,
        "vocab_parallel_logprobs vocab_parallel_entropy vocab_parallel_kl_div",
    ),
    "checkpoint.zero_checkpoint": (_CHECKPOINTS, "ZeROCheckpoint"),
    "elasticity.elastic_agent": (_ELASTIC, "DSElasticAgent"),
    "linear": (_LINEAR, "OptimizedLinear LoRAConfig QuantizationConfig Init init_lora"),
    "runtime.comm.coalesced_collectives": (_BACKENDS, "reduce_scatter_coalesced all_to_all_quant_reduce"),
    "runtime.config_utils": ("derive the model from pydantic.BaseModel.", "DeepSpeedConfigModel"),
    "runtime.sparse_tensor": (
        "make embeddings with sparse=True, or set sparse_gradients in the config: the engine reduces their gradients.",
        "SparseTensor",
    ),
    "runtime.hybrid_engine": (_HYBRID, "DeepSpeedHybridEngine"),
    "sequence.auto_sp": (_SEQUENCE, "auto_wrap_model_for_sp"),
    "sequence.cross_entropy": (_SEQUENCE, "vocab_parallel_cross_entropy"),
    "sequence.fpdt_layer": (_SEQUENCE, "FPDT_Attention FPDT_FFN FPDT_InputConstruct FPDT_LogitsLoss"),
    "sequence.layer": (_SEQUENCE, "single_all_to_all"),
}

# Modules that cannot be imported, by what to do instead: their contents have no replacement.
NAMED: dict[str, str] = {
    _BACKENDS: "comm.config comm.constants comm.mori comm.pg_utils comm.utils",
    _LAUNCHER: "launcher.launcher_helper",
    _EXPERTS: (
        "moe.ep_count moe.ep_kernels moe.ep_repack moe.ep_tp_dispatch moe.fused_expert_layout checkpoint.affine"
        " checkpoint.affine_transfer checkpoint.autoep_affine checkpoint.autoep_universal"
        " checkpoint.autoep_zero3_metadata"
    ),
    "use tensorboard, wandb, comet or csv_monitor in the config, or MonitorMaster(get_monitor_config({...})).": (
        "monitor.utils monitor.comet monitor.csv_monitor monitor.tensorboard monitor.wandb"
    ),
    "read deepspeed.DeepSpeedConfig(config), whose attributes are the keys.": (
        "runtime.data_pipeline.config utils.config"
    ),
    "write it in the script: these are a few lines of Python or torch.": (
        "utils.bwc utils.debug utils.exceptions utils.module_utils"
    ),
    "set OMP_NUM_THREADS, or start the command with --bind_cores_to_rank.": "utils.numa",
    "read engine.memory_report().": "runtime.zero.offload_states",
    "import the builder from deepspeed.ops.op_builder.": (
        "ops.op_builder.async_io ops.op_builder.cpu ops.op_builder.cpu_adagrad ops.op_builder.cpu_adam"
        " ops.op_builder.cpu_lion ops.op_builder.fused_adam ops.op_builder.fused_lamb ops.op_builder.fused_lion"
        " ops.op_builder.transformer_inference ops.op_builder.utils"
    ),
    "read deepspeed.__version__ and deepspeed.git_version_info.": "git_version_info_installed",
    "use typing.": "compat utils.types",
    "leave it out: Shoal does not disable Python's garbage collector.": "runtime.python_gc",
    KERNELS: "ops.compile ops.triton_ops ops.adam.multi_tensor_apply ops.lion.multi_tensor_apply",
    "call get_accelerator().pin_memory(tensor).": "ops.pin_memory utils.pin_memory utils.pin_memory_tracker",
    "call get_accelerator(): it answers for the device there is.": (
        "accelerator.cpu_accelerator accelerator.cuda_accelerator accelerator.hpu_accelerator"
        " accelerator.klxpu_accelerator accelerator.mlu_accelerator accelerator.mps_accelerator"
        " accelerator.npu_accelerator accelerator.sdaa_accelerator accelerator.supa_accelerator"
        " accelerator.xpu_accelerator"
    ),
    "write the keys in the config.": "profiling.constants runtime.swap_tensor.constants runtime.swap_tensor.aio_config",
    "set activation_checkpointing.cpu_checkpointing or offload_activation in the config.": (
        "runtime.activation_checkpointing.offload_activations"
    ),
    "set data_types.keep_in_fp32_modules in the config.": "runtime.keep_in_fp32",
    "set torch_autocast in the config.": "runtime.torch_autocast",
    _SWAPPING: (
        "runtime.swap_tensor.optimizer_utils runtime.swap_tensor.pipelined_optimizer_swapper runtime.swap_tensor.utils"
    ),
    "leave it to the engine, which gathers and prefetches by itself.": (
        "runtime.zero.contiguous_memory_allocator runtime.zero.partitioned_param_profiler utils.mixed_precision_linkage"
    ),
    SERVING: "runtime.hybrid_engine_graph utils.static_cache",
    _SEQUENCE: "sequence.autosp_detector sequence.autosp_fusion sequence.autosp_vit",
}
_NAMED = {name: do for do, names in NAMED.items() for name in names.split()}

# Names that are missing in modules that are there: name of the module below ``deepspeed``: what to do: the names.
MISSING: dict[str, dict[str, str]] = {
    "": {
        KERNELS: (
            "DeepSpeedTransformerLayer DeepSpeedTransformerConfig replace_transformer_layer revert_transformer_layer"
        ),
        SERVING: "InferenceEngine DeepSpeedInferenceConfig init_inference default_inference_config",
    },
    "checkpoint": {
        "engine.load_checkpoint() and `shoal convert` read DeepSpeed's checkpoints: any layout loads in any other.": (
            "ZeROCheckpoint get_model_3d_descriptor merge_state model_3d_desc reshape_meg_2d_parallel"
        ),
    },
    "checkpoint.universal_checkpoint": {
        "leave it out: engine.load_checkpoint() loads any layout in any other, universal folders of DeepSpeed's too.": (
            "enable_universal_checkpoint load_hp_checkpoint_state"
        ),
    },
    "runtime.utils": {"use torch.distributed.tensor.": "PartitionedTensor"},
}


def not_built(name: str, do: str) -> NotBuiltError:
    return NotBuiltError(f"{name} is not a part of Shoal.", do=do, code="deepspeed-part")


def absent_function(name: str, do: str) -> Callable[..., Any]:
    """A function that raises NotBuiltError, by its name with its module. ``do``: what to use instead."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise not_built(name, do)

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__module__ = name.rpartition(".")[0]
    refuse.__doc__ = f"Raises: NotBuiltError: always. Instead: {do}"
    return refuse


def absent_class(name: str, do: str) -> type:
    """A class of that name, of which nothing can be made: calling it, or a class derived from it, raises NotBuiltError.

    ``isinstance`` with it is False, and a class statement that derives from it runs.
    """

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise not_built(name if cls.__name__ == name.rpartition(".")[2] else f"{name}, the base of {cls.__name__},", do)

    body = {"__new__": refuse, "__module__": name.rpartition(".")[0], "__doc__": f"Not built. Instead: {do}"}
    return type(name.rpartition(".")[2], (), body)


class AbsentModuleError(NotBuiltError, ModuleNotFoundError):
    """A module of DeepSpeed's that is not there; also a ModuleNotFoundError, for code that tries an import."""

    code = "deepspeed-part"


def what_to_do(name: str) -> str | None:
    """What to do instead of importing a module that cannot be imported; None for a module that is in no table."""
    above = next((package for package in ABSENT if name.startswith(package + ".")), None)
    return _NAMED.get(name) if name in _NAMED or above is None else ABSENT[above][0]
