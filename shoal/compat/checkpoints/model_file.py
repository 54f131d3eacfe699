"""DeepSpeed's model file: weights and buffers, tied names, counters, the schedule, and what the client saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.checkpoint.portable import About, TensorInfo
from shoal.compat.checkpoints.files import LossScaler, not_built
from shoal.compat.checkpoints.state import NamedState, StateTensor, Tensors, check_stored, damaged, entry

# Everything else at the top of a model file is the client's.
RESERVED = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "csr_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts", "ds_autoep_layers", "autoep_layers",
    "universal_checkpoint_info", "folding",
}  # fmt: skip
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_NOT_KEPT = {"data_sampler": "The data sampler's state (curriculum learning)", "random_ltd": "Random-LTD's state"}


class ModelFile:
    """A model file's contents.

    Args:
        state: what the file holds.
        file: its name, for errors.
        is_stage_3: its parameters are empty tensors, of which only the dtype is known.
        aliases: the other names of tied weights, if another file says them; None: this one does.
        experts: weights of experts, which files of their own hold.

    Raises:
        CheckpointError: it is no model file.
        NotBuiltError: it is a part of a pipeline, without its layers.
    """

    def __init__(
        self,
        state: dict[str, Any],
        file: str,
        *,
        is_stage_3: bool,
        aliases: dict[str, tuple[str, ...]] | None = None,
        experts: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.num_parts = _number_of_parts(state, file)
        self.state, self.file, self.is_stage_3 = state, file, is_stage_3
        self.notes: list[str] = []
        module = entry(state, "module", file)
        if not isinstance(module, Mapping):
            raise damaged(f"the module is a {type(module).__name__}, not a dict", file)
        others = [name for name, value in module.items() if not isinstance(value, torch.Tensor)]
        if others:
            self.notes.append(f"{', '.join(others[:5])} in the module are no tensors, and were left out.")
        self.tensors: dict[str, torch.Tensor] = {
            name: value for name, value in module.items() if isinstance(value, torch.Tensor)
        }
        for name, tensor in self.tensors.items():
            check_stored(name, tensor, file)
        self.experts = dict(experts or {})
        self.tensors.update(self.experts)
        buffers = set(state.get("buffer_names") or ())
        self.buffers = {name for name in self.tensors if name in buffers or name.endswith("_extra_state")}
        self.aliases = self._tied() if aliases is None else aliases
        self._other_names = {name for names in self.aliases.values() for name in names}

    def parameters(self) -> dict[str, torch.Tensor]:
        """Each once, in the model's order."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if name not in self.buffers and name not in self._other_names
        }

    def weights(self, elsewhere: Tensors) -> dict[str, StateTensor]:
        """All weights and buffers, in the model's order.

        Args:
            elsewhere: those that are not read from this file.

        Raises: CheckpointError: stage 3, and a weight is in no file.
        """
        names = [name for name in self.tensors if name not in self._other_names]
        lost = [name for name in names if name not in elsewhere and self.is_stage_3 and name not in self.buffers]
        if lost:
            raise damaged(f"the weights of {lost[0]} are in no file", self.file)
        here = {name: StateTensor.of(self.tensors[name]) for name in names}
        return {**here, **elsewhere}

    def about(self, infos: Mapping[str, TensorInfo], trained: NamedState | None, scale: Any) -> About:
        """All that is known in addition to the tensors."""
        state = self.state
        for key, what in _NOT_KEPT.items():
            if state.get(key) is not None:
                self.notes.append(f"{what} was left out.")
        parameters = {
            name: TensorInfo(self.tensors[name].dtype if name in self.tensors else info.dtype, info.shape)
            for name, info in infos.items()
            if name not in self.buffers
        }
        about = About(
            parameters=parameters,
            aliases=self.aliases,
            schedule=state.get("lr_scheduler"),
            counters=self._counters(),
            loss_scale=self._loss_scale(scale),
            client_state={key: value for key, value in state.items() if key not in RESERVED},
            config=config if isinstance(config := state.get("ds_config"), dict) else {},
        )
        if trained is not None:
            about.group_of, about.groups, about.scalars = trained.group_of, trained.groups, trained.scalars
            about.optimizer = optimizer_name(state.get("ds_config"), trained)
            self.notes.extend(note for note in trained.notes if note not in self.notes)
        about.notes = self.notes
        return about

    def _tied(self) -> dict[str, tuple[str, ...]]:
        """The other names of tied weights."""
        said = self.state.get("shared_params")
        aliases: dict[str, tuple[str, ...]] = {}
        if said is None and not self.is_stage_3:
            seen: dict[Any, str] = {}
            for name, tensor in self.tensors.items():
                if name in self.buffers or not tensor.numel():
                    continue
                key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
                if key in seen:
                    aliases[seen[key]] = (*aliases.get(seen[key], ()), name)
                seen.setdefault(key, name)
            return aliases
        for other, name in (said or {}).items():
            first, second = self.tensors.get(name), self.tensors.get(other)
            # Below stage 3 DeepSpeed calls all parameters without elements one and the same.
            is_empty = first is not None and not first.numel() and not self.is_stage_3
            if not is_empty and first is not None and second is not None and first.shape == second.shape:
                aliases[name] = (*aliases.get(name, ()), other)
        return aliases

    def _counters(self) -> dict[str, int]:
        counters = {key: int(self.state[key]) for key in _COUNTERS if isinstance(self.state.get(key), int)}
        config = self.state.get("ds_config")
        steps = config.get("gradient_accumulation_steps") if isinstance(config, Mapping) else None
        if isinstance(steps, int) and "global_steps" in counters:
            counters["micro_steps"] = counters["global_steps"] * steps  # it is not saved
        return counters

    def _loss_scale(self, scale: Any) -> dict[str, Any] | None:
        """The scale of fp16 as Shoal's ``LossScale.state_dict()`` has it."""
        if torch.float16 not in {tensor.dtype for tensor in self.parameters().values()}:
            return None
        values = scale.values if isinstance(scale, LossScaler) else scale
        if not isinstance(values, Mapping) or "cur_scale" not in values:
            return None
        return {
            "scale": float(values["cur_scale"]),
            "iteration": int(values.get("cur_iter", 0)),
            "last_overflow_iteration": int(values.get("last_overflow_iter", -1)),
            "hysteresis": int(values.get("cur_hysteresis", 1)),
        }


def optimizer_name(config: Any, trained: NamedState) -> str | None:
    """The optimizer's class: from the configuration, or else by its settings and state; None: unknown."""
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    if isinstance(section, Mapping) and isinstance(section.get("type"), str):
        settings = section.get("params") or {}
        if section["type"].lower() == "adam" and settings.get("adam_w_mode", True):
            return "AdamW"  # DeepSpeed's "Adam" decouples the weight decay unless adam_w_mode is false
        return "AdamW" if section["type"].lower() == "adamw" else section["type"]
    kinds, group = set(trained.kinds()), trained.groups[0] if trained.groups else {}
    if {"optimizer/exp_avg", "optimizer/exp_avg_sq"} <= kinds and "decoupled_weight_decay" in group:
        return "AdamW" if group["decoupled_weight_decay"] else "Adam"
    if {"momentum", "dampening", "nesterov"} <= set(group):
        return "SGD"
    return None


def _number_of_parts(state: dict[str, Any], file: str) -> int:
    """The tensor-parallel ranks. Raises: NotBuiltError: another parallelism split the model."""
    dimensions = state.get("checkpoint_parallel_dimensions") or {}
    if "module" in state and state["module"] is None:
        raise not_built("pipeline parallelism and without files of layers", file)
    return int(dimensions.get("tp_degree") or state.get("mp_world_size") or 1)
