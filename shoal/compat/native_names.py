"""What Shoal's own engine and optimizer have in place of DeepSpeed's names: the text of the error for each name.

An engine that ``shoal.initialize`` makes has the names that Shoal's documentation lists. All of DeepSpeed's are on the
classes of ``shoal.compat``, which ``deepspeed.initialize`` makes.
"""

from __future__ import annotations

from shoal.compat.engine import DeepSpeedEngine, DeepSpeedPipelineEngine
from shoal.compat.engine_names import ATTRIBUTES, DERIVED, NOT_HERE, PATHS
from shoal.compat.optimizer import DeepSpeedShardedOptimizer
from shoal.engine.pipeline import PipelineEngine
from shoal.running.foreign_names import AbsentError
from shoal.running.optimizer import ShardedOptimizer

# what serves -> names of an engine
_ENGINE = {
    "type(engine.client_optimizer).__name__": "optimizer_name",
    "engine.optimizer, which has it": "defaults param_groups state",
    "engine.optimizer.param_groups": "get_mom get_type",
    "engine.sharded.switch": "parameter_offload",
    "engine.train_batch_size() and the other two": "get_batch_info",
    "engine.accumulation.micro_batch": "set_train_micro_batch_size",
    "engine.accumulation.mean_loss": "losses",
    'engine.axes.mesh.index("tp", engine.global_rank)': "get_model_parallel_rank get_tensor_parallel_rank",
    'engine.axes.mesh.size("sequence")': "sequence_parallel_size",
    'engine.world.process_group("dp", engine.axes.mesh)': "data_parallel_group",
    'engine.world.process_group("loss", engine.axes.mesh)': "seq_data_parallel_group",
    'engine.world.process_group("sequence", engine.axes.mesh)': "get_sequence_parallel_group seq_parallel_group",
    'engine.world.process_group("ep", engine.axes.mesh)': "expert_parallel_group",
    'engine.world.process_group("expert_data", engine.axes.mesh)': "expert_data_parallel_group",
    "engine.module.named_parameters()": "param_names",
    "engine.module.modules()": "gate_modules has_moe_layers moe_layers num_experts",
    "engine.timers.last_step, in seconds by phase": "get_wall_clock_timers",
    "initialize(training_data=...), or shoal.data.Loader": "deepspeed_io",
    'engine.save_16bit_model(folder, "pytorch_model.bin")': "save_fp16_model",
    "engine.sharded.sparse_names": "sparse_tensor_module_names",
    "engine.step(), which reduces what backward() has not": "allreduce_gradients",
    "engine.properties.config.communication_data_type": "communication_data_type",
    # of an engine with pipeline stages
    "engine.axes.mesh": "grid",
    "engine.gradient_accumulation_steps()": "micro_batches",
    "engine.axes.mesh.pp": "is_pipe_parallel num_stages",
    'engine.axes.mesh.index("pp", engine.global_rank)': "get_pipeline_parallel_rank stage_id",
    "engine.dp_world_size": "is_data_parallel",
    'engine.axes.get("tp")': "is_model_parallel",
}
# what serves -> names of an optimizer
_OPTIMIZER = {
    "optimizer.loss_scale": "cur_scale loss_scale_config loss_scaler needs_scaler",
    "engine.accumulation.loss_scale, which is None without fp16": "dynamic_loss_scale",
    "engine.gradient_clipping()": "clip_grad",
    "shoal.zero.safe_get_local_fp32_param(parameter)": (
        "fp32_groups fp32_groups_flat fp32_partitioned_groups_flat single_partition_of_fp32_groups"
    ),
    "shoal.zero.safe_get_local_grad(parameter)": "averaged_gradients",
}
_SERVES = {
    **{name: f"engine.properties.config.{path}" for name, path in PATHS.items()},
    **{name: f"engine.{path}" for name, path in ATTRIBUTES.items()},
    **dict.fromkeys(DERIVED, "engine.properties.config"),
    **{name: serves for serves, names in (_ENGINE | _OPTIMIZER).items() for name in names.split()},
}


def advise(kind: type, name: str) -> AbsentError | None:
    """The error for a name of DeepSpeed's that an object of this class of Shoal's does not have; None: it is no such
    name, or the class is one of ``shoal.compat``.
    """
    if issubclass(kind, DeepSpeedEngine | DeepSpeedShardedOptimizer):
        return None
    is_optimizer = issubclass(kind, ShardedOptimizer)
    theirs: type = DeepSpeedPipelineEngine if issubclass(kind, PipelineEngine) else DeepSpeedEngine
    owner, theirs = ("optimizer", DeepSpeedShardedOptimizer) if is_optimizer else ("engine", theirs)
    if name in NOT_HERE and not is_optimizer:
        do = NOT_HERE[name]
    elif hasattr(theirs, name):
        do = (
            (f"use {_SERVES[name]}; or " if name in _SERVES else "")
            + "make the engine by deepspeed.initialize(), or after `import deepspeed`, which is Shoal under"
            " `shoal run --as-deepspeed` or after shoal.compat.deepspeed.install(): it has all of DeepSpeed's names"
        )
    else:
        return None
    return AbsentError(
        f"{owner}.{name} is a name of DeepSpeed's, which Shoal's {owner} does not have.",
        do=f"{do}.",
        code="engine-absent",
    )
