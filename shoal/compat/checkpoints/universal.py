"""DeepSpeed's universal format, which its ``ds_to_universal`` makes: a folder for each parameter, in it a file for each
kind of state, whole.

    FOLDER/latest_universal                       the tag
    FOLDER/TAG/*mp_rank_00_model_states.pt        as in the checkpoint that was converted
    FOLDER/TAG/zero/optimizer_state.pt            the groups' hyperparameters, the loss scale
    FOLDER/TAG/zero/NAME/fp32.pt                  the master weights
    FOLDER/TAG/zero/NAME/exp_avg.pt               the optimizer's state, under its name
    FOLDER/TAG/zero/NAME/step.pt                  its step; of stage 3 it stands in optimizer_state.pt

Of stages 1 and 2, and of tensor parallelism, a file holds ``{"param": tensor}``, else of stage 3 the flattened tensor.
A run with tensor parallelism (but no pipeline) is read like any other: its tensors are whole, and their shapes stand
in the files. What its model files hold of parameters that were not trained is a part, so those have to be the same on
all of its ranks. The experts of AutoEP lie in one tensor of all ranks' experts, in the order of their numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.manifest import MODEL, OPTIMIZER
from shoal.checkpoint.portable import TensorInfo
from shoal.checkpoint.problems import unsafe
from shoal.compat.checkpoints.autoep import AutoEpLayer, of_expert
from shoal.compat.checkpoints.files import Turns, is_inside, not_built, open_file, open_value
from shoal.compat.checkpoints.model_file import ModelFile
from shoal.compat.checkpoints.state import (
    NamedState,
    check_stored,
    damaged,
    entry,
    hyperparameters,
    sort_state,
)


class UniversalState(NamedState):
    """The optimizer's state by parameter, in files that are opened when a tensor is read.

    Args:
        experts: the tensors that hold experts of AutoEP.
    """

    def __init__(self, experts: Collection[str] = ()) -> None:
        super().__init__()
        self._experts = experts
        self._infos: dict[str, dict[str, TensorInfo]] = {MODEL: {}}
        self._files: dict[tuple[str, str], Path] = {}
        self._rows: dict[str, int] = {}  # of the tensors that lie in another

    def add(
        self, folder: Path, name: str, shape: Sequence[int], group: int, turns: Turns, *, is_part: bool = False
    ) -> None:
        """Look at a parameter's files.

        Args:
            is_part: ``shape`` is that of a tensor-parallel rank's part.

        Raises: CheckpointError: one is missing, or is another parameter's.
        """
        self.group_of[name] = group
        found = sorted(path for path in folder.iterdir() if path.suffix == ".pt") if folder.is_dir() else []
        if not any(path.stem == "fp32" for path in found):
            raise damaged(f"the weights of {name} are missing", str(folder / "fp32.pt"))
        for path in sorted(found, key=lambda path: path.stem != "fp32"):
            held = open_value(path, verify=turns.take())
            is_weight = path.stem == "fp32"
            if is_part and is_weight:
                shape = _whole_shape(held, len(shape), path)
            if isinstance(held, Mapping) and held.get("is_expert_param") and name not in self._experts:
                raise not_built("mixture-of-experts layers", str(path))
            value = _value_of(held, shape, path)
            if not is_weight and _is_number(value):
                self.scalars.setdefault(name, {}).update(sort_state({path.stem: value}, (), self.notes)[1])
                continue
            if not isinstance(value, torch.Tensor):
                raise damaged(f"a tensor was expected, not a {type(value).__name__}", str(path))
            check_stored(name, value, str(path))
            if value.numel() != math.prod(shape) and not _is_cut(value, shape):
                raise damaged(f"it has the shape {list(value.shape)}, and {name} is {list(shape)}", str(path))
            kind = MODEL if is_weight else OPTIMIZER + path.stem
            self._infos.setdefault(kind, {})[name] = TensorInfo(value.dtype, tuple(shape))
            self._files[kind, name] = path

    def add_experts(
        self, folder: Path, layer: AutoEpLayer, tensor: str, shape: Sequence[int], group: int, turns: Turns
    ) -> None:
        """Look at the files of a layer's experts.

        Args:
            shape: of one expert's weight.

        Raises: CheckpointError: one is missing, or has another number of experts.
        """
        self.add(folder, tensor, (layer.num_experts, *shape), group, turns)
        del self.group_of[tensor]
        scalars = self.scalars.pop(tensor, {})
        whole = {
            kind: (infos.pop(tensor), self._files.pop((kind, tensor)))
            for kind, infos in self._infos.items()
            if tensor in infos
        }
        for expert in range(layer.num_experts):
            name = of_expert(tensor, expert)
            self.group_of[name], self._rows[name] = group, expert
            if scalars:
                self.scalars[name] = dict(scalars)
            for kind, (info, path) in whole.items():
                self._infos[kind][name], self._files[kind, name] = TensorInfo(info.dtype, info.shape[1:]), path

    def kinds(self) -> list[str]:
        return list(self._infos)

    def infos(self, kind: str) -> dict[str, TensorInfo]:
        return self._infos[kind]

    def read(self, kind: str, name: str) -> torch.Tensor:
        """Memory: the tensor."""
        info, path = self._infos[kind][name], self._files[kind, name]
        held = open_value(path, verify=False)
        row = self._rows.get(name)
        value = _value_of(held, info.shape, path) if row is None else entry(held, "param", str(path))[row]
        if not isinstance(value, torch.Tensor) or value.dtype != info.dtype:
            raise damaged("it changed while it was read", str(path))
        if value.numel() == math.prod(info.shape):
            return value.detach().reshape(info.shape).clone(memory_format=torch.contiguous_format)
        whole = torch.zeros(info.shape, dtype=info.dtype)
        whole[: value.shape[0]] = value.detach()
        return whole


def read_universal(
    folder: Path, module: ModelFile, turns: Turns, layers: Sequence[AutoEpLayer] = ()
) -> tuple[UniversalState, Any]:
    """The optimizer's state, and its loss scale.

    Args:
        folder: ``zero`` of a tag.
        module: names the parameters, group by group.
        layers: of AutoEP.

    Raises: CheckpointError: files are missing, or contradict each other.
    """
    place = folder / "optimizer_state.pt"
    state = open_file(place, verify=turns.take())
    shapes = module.state.get("param_shapes")
    if not isinstance(shapes, list):
        raise damaged("entry 'param_shapes' is missing", module.file)
    settings = entry(state, "param_groups", str(place))
    # At stage 3 a group is cut into flat tensors, and its entries name them; before it a group is one.
    of_flat = {int(flat): index for index, group in enumerate(settings) for flat in group["params"]}
    of_layer = {tensor: layer for layer in layers for tensor in layer.tensors}
    found = UniversalState(of_layer)
    found.groups, steps = hyperparameters({"param_groups": settings}, len(settings), found.notes)
    inner = state.get("optimizer_state_dict")
    counted = inner.get("state", {}) if isinstance(inner, Mapping) else {}
    for index, members in enumerate(shapes):
        group = of_flat.get(index, 0)
        numbers = {**steps[group], **_numbers_of(counted.get(index, {}))}
        for name, shape in members.items():
            if not is_inside(name):
                raise unsafe(f"{name[:200]!r} is not the name of a folder in it.", str(folder))
            if numbers and math.prod(shape):
                found.scalars[name] = dict(numbers)
            if name in of_layer:
                found.add_experts(folder / name, of_layer[name], name, tuple(shape)[1:], group, turns)
                continue
            found.add(folder / name, name, tuple(shape), group, turns, is_part=module.num_parts > 1)
    if module.num_parts > 1:
        _refuse_parts(module, found)
    return found, state.get("loss_scaler")


def _refuse_parts(module: ModelFile, found: UniversalState) -> None:
    """Raises: NotBuiltError: a parameter was not trained, and may be a part."""
    information = module.state.get("universal_checkpoint_info")
    patterns = information.get("tp_replicated_parameter_patterns") if isinstance(information, Mapping) else None
    untrained = [name for name in module.parameters() if name not in found.group_of]
    # Patterns are compared, not run: those that DeepSpeed's AutoTP writes are one for each name.
    split = [name for name in untrained if f"^{re.escape(name)}$" not in (patterns or ())]
    if split:
        raise not_built(f"tensor parallelism of parameters that are not trained ({', '.join(split[:3])})", module.file)


def _whole_shape(held: Any, num_dims: int, path: Path) -> tuple[int, ...]:
    value = held.get("param") if isinstance(held, Mapping) else None
    if not isinstance(value, torch.Tensor) or value.dim() != num_dims:
        raise not_built("tensor parallelism of a tensor whose shape is not kept", str(path))
    return tuple(value.shape)


def _numbers_of(state: Any) -> dict[str, Any]:
    """What of a flat tensor's state is one number for all of it."""
    if not isinstance(state, Mapping):
        return {}
    return sort_state({key: value for key, value in state.items() if _is_number(value)}, (), [])[1]


def _is_number(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, torch.Tensor) else isinstance(value, bool | int | float)


def _value_of(held: Any, shape: Sequence[int], path: Path) -> Any:
    if not isinstance(held, Mapping):
        return held
    value = entry(held, "param", str(path))
    if isinstance(value, torch.Tensor) and _is_cut(value, shape) and not held.get("vocab_tensor"):
        raise damaged(f"it has {value.shape[0]} rows of {shape[0]}", str(path))
    return value


def _is_cut(value: torch.Tensor, shape: Sequence[int]) -> bool:
    """True if the last rows are missing. DeepSpeed omits the rows that pad a vocabulary, and reads zeros."""
    return value.dim() == len(shape) > 1 and value.shape[1:] == tuple(shape[1:]) and value.shape[0] < shape[0]
