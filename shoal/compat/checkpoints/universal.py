"""DeepSpeed's universal format: a folder for each parameter, in it a file for each kind of state, whole.

    FOLDER/latest_universal                                     the tag
    FOLDER/TAG/[zero_pp_rank_0_]mp_rank_00_model_states.pt      weights, counters, client state; the prefix at stage 3
    FOLDER/TAG/zero/optimizer_state.pt                          the groups' hyperparameters, the loss scale
    FOLDER/TAG/zero/NAME/fp32.pt                                the master weights of a trained parameter
    FOLDER/TAG/zero/NAME/exp_avg.pt                             the optimizer's state, under its name
    FOLDER/TAG/zero/NAME/step.pt                                its step; of stage 3 it stands in optimizer_state.pt

**Read.** Of stages 1 and 2, and of tensor parallelism, a file holds ``{"param": tensor}``, else of stage 3 the
flattened tensor. A run with tensor parallelism (but no pipeline) is read like any other: its tensors are whole, and
their shapes stand in the files. What its model files hold of parameters that were not trained is a part, so those have
to be the same on all of its ranks. The experts of AutoEP lie in one tensor of all ranks' experts, in the order of their
numbers.

**Written.** A rank of the run that loads it takes its part of each file: with AutoTP by the layers' own description, of
a pipeline what the stage has, of a model that splits its own tensors along the dim that the file names (``cat_dim``).

**Made in place of it**, as DeepSpeed's ``ds_to_universal`` does, a checkpoint for every layout under another tag:

    INPUT is                        ROOT/NAME becomes
    a checkpoint of Shoal's         the same checkpoint: its files under a second name, or copied, and a manifest
    one of DeepSpeed's              a checkpoint of Shoal's, converted

    ROOT/latest_universal           NAME

A save of Shoal's creates new files and never writes into an existing one. So a hard link is as safe as a copy: if one
checkpoint is replaced or removed, the other stays complete. The bytes are on the disk once. The new checkpoint is
loaded by its tag, or with ``checkpoint.load_universal``; ``latest`` goes on to name another.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import directory
from shoal.checkpoint.commit import Commit, Retention
from shoal.checkpoint.directory import LATEST_UNIVERSAL
from shoal.checkpoint.formats import detect, open_source
from shoal.checkpoint.formats.target import split
from shoal.checkpoint.formats.torch_file_writing import DeferredTensor
from shoal.checkpoint.manifest import MODEL, OPTIMIZER
from shoal.checkpoint.native import ShoalSource, write_shoal
from shoal.checkpoint.portable import Source, TensorInfo, join
from shoal.checkpoint.problems import unsafe
from shoal.checkpoint.rectangles import Rectangle, whole
from shoal.checkpoint.storage import LocalStorage, Storage, open_storage
from shoal.compat.checkpoints import DEEPSPEED, UNIVERSAL
from shoal.compat.checkpoints.autoep import AutoEpLayer, of_expert
from shoal.compat.checkpoints.experts import files_of_experts
from shoal.compat.checkpoints.files import Turns, is_inside, not_built, open_file, open_value
from shoal.compat.checkpoints.layout import DeepSpeedSettings, settings_of
from shoal.compat.checkpoints.model_file import ModelFile
from shoal.compat.checkpoints.state import (
    NamedState,
    StateTensor,
    check_stored,
    damaged,
    entry,
    hyperparameters,
    sort_state,
)
from shoal.compat.checkpoints.writing import VERSION, DeepSpeedFiles
from shoal.errors import CheckpointError
from shoal.text import listed


def _add(
    state: NamedState,
    folder: Path,
    name: str,
    shape: tuple[int, ...],
    group: int,
    numbers: Mapping[str, Any],
    turns: Turns,
    *,
    layer: AutoEpLayer | None = None,
    is_part: bool = False,
) -> None:
    """Look at a parameter's files, which are opened again when a tensor is read.

    Args:
        numbers: state of one value.
        layer: of AutoEP, whose experts lie in the parameter.
        is_part: ``shape`` is that of a tensor-parallel rank's part.

    Raises: CheckpointError: a file is missing, or is another parameter's, or has another number of experts.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix == ".pt") if folder.is_dir() else []
    if not any(path.stem == "fp32" for path in files):
        raise damaged(f"the weights of {name} are missing", str(folder / "fp32.pt"))
    names = [name] if layer is None else [of_expert(name, expert) for expert in range(layer.num_experts)]
    scalars = dict(numbers)
    for path in sorted(files, key=lambda path: path.stem != "fp32"):
        content = open_value(path, verify=turns.take())
        is_weight = path.stem == "fp32"
        if is_part and is_weight:
            shape = _whole_shape(content, len(shape), path)
        if isinstance(content, Mapping) and content.get("is_expert_param") and layer is None:
            raise not_built("mixture-of-experts layers", str(path))
        value = _value_of(content, shape, path)
        if not is_weight and _is_number(value):
            scalars.update(sort_state({path.stem: value}, (), state.notes)[1])
            continue
        if not isinstance(value, torch.Tensor):
            raise damaged(f"a tensor was expected, not a {type(value).__name__}", str(path))
        check_stored(name, value, str(path))
        if value.numel() != math.prod(shape) and not _is_cut(value, shape):
            raise damaged(f"it has the shape {list(value.shape)}, and {name} is {list(shape)}", str(path))
        info = TensorInfo(value.dtype, shape if layer is None else shape[1:])
        state.tensors.setdefault(MODEL if is_weight else OPTIMIZER + path.stem, {}).update(
            (each, StateTensor(info, partial(_read, path, info, None if layer is None else row)))
            for row, each in enumerate(names)
        )
    for each in names:
        state.group_of[each] = group
        if scalars:
            state.scalars[each] = dict(scalars)


def _read(path: Path, info: TensorInfo, row: int | None) -> torch.Tensor:
    """One tensor, or a row of it. Memory: the tensor."""
    content = open_value(path, verify=False)
    value = _value_of(content, info.shape, path) if row is None else entry(content, "param", str(path))[row]
    if not isinstance(value, torch.Tensor) or value.dtype != info.dtype:
        raise damaged("it changed while it was read", str(path))
    if value.numel() == math.prod(info.shape):
        return join(info, [(whole(info.shape), value.detach().reshape(info.shape))])
    there = Rectangle((0,) * value.dim(), tuple(value.shape))
    missing = Rectangle((len(value), *there.start[1:]), (info.shape[0] - len(value), *there.shape[1:]))
    return join(info, [(there, value.detach()), (missing, torch.zeros((), dtype=torch.float32, device="cpu"))])


def read_universal(
    folder: Path, module: ModelFile, turns: Turns, layers: Sequence[AutoEpLayer] = ()
) -> tuple[NamedState, Any]:
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
    trained = NamedState()
    trained.groups, steps = hyperparameters({"param_groups": settings}, len(settings), trained.notes)
    inner = state.get("optimizer_state_dict")
    counted = inner.get("state", {}) if isinstance(inner, Mapping) else {}
    for index, members in enumerate(shapes):
        group = of_flat.get(index, 0)
        numbers = {**steps[group], **_numbers_of(counted.get(index, {}))}
        for name, shape in members.items():
            if not is_inside(name):
                raise unsafe(f"{name[:200]!r} is not the name of a folder in it.", str(folder))
            layer, is_part = of_layer.get(name), module.num_parts > 1
            size = tuple(shape) if layer is None else (layer.num_experts, *shape[1:])
            counts = numbers if math.prod(shape) else {}
            _add(
                trained, folder / name, name, size, group, counts, turns, layer=layer, is_part=is_part and layer is None
            )
    if module.num_parts > 1:
        _refuse_parts(module, trained)
    return trained, state.get("loss_scaler")


def _refuse_parts(module: ModelFile, trained: NamedState) -> None:
    """Raises: NotBuiltError: a parameter was not trained, and may be a part."""
    information = module.state.get("universal_checkpoint_info")
    patterns = information.get("tp_replicated_parameter_patterns") if isinstance(information, Mapping) else None
    untrained = [name for name in module.parameters() if name not in trained.group_of]
    # Patterns are compared, not run: those that DeepSpeed's AutoTP writes are one for each name.
    split = [name for name in untrained if f"^{re.escape(name)}$" not in (patterns or ())]
    if split:
        raise not_built(f"tensor parallelism of parameters that are not trained ({', '.join(split[:3])})", module.file)


def _whole_shape(content: Any, num_dims: int, path: Path) -> tuple[int, ...]:
    value = content.get("param") if isinstance(content, Mapping) else None
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


def _value_of(content: Any, shape: Sequence[int], path: Path) -> Any:
    if not isinstance(content, Mapping):
        return content
    value = entry(content, "param", str(path))
    if isinstance(value, torch.Tensor) and _is_cut(value, shape) and not content.get("vocab_tensor"):
        raise damaged(f"it has {value.shape[0]} rows of {shape[0]}", str(path))
    return value


def _is_cut(value: torch.Tensor, shape: Sequence[int]) -> bool:
    """True if the last rows are missing. DeepSpeed omits the rows that pad a vocabulary, and reads zeros."""
    return value.dim() == len(shape) > 1 and value.shape[1:] == tuple(shape[1:]) and value.shape[0] < shape[0]


_ADAM = {f"{OPTIMIZER}exp_avg", f"{OPTIMIZER}exp_avg_sq"}


def write_deepspeed_universal(
    source: Source,
    folder: str | os.PathLike[str],
    *,
    stage: int | None = None,
    config: Mapping[str, Any] | None = None,
    tag: str | None = None,
    row_parallel: Sequence[str] = (),
) -> list[str]:
    """Write what DeepSpeed 0.19.8 loads with ``checkpoint.load_universal``, on any number of ranks of any axis.

    Args:
        stage: ZeRO stage of the run that loads it; None: that of ``config``. Stages 1 and 2 read each other's files.
        config: its DeepSpeed configuration; None: that of the run that saved the source.
        tag: None: ``global_step`` and the number of steps.
        row_parallel: patterns of whole parameter names. A model that splits its own tensors splits these along dim 1.

    Returns: a sentence for each thing that DeepSpeed does not restore from it.
    Raises: CheckpointError: the folder is there already, or DeepSpeed cannot load the source from this format.
    Memory: one tensor.
    """
    about = source.about
    chosen = dict(about.config if config is None else config)
    files = _UniversalFiles(source, settings_of(chosen, stage, 1, about), chosen, row_parallel)
    files.save(folder, tag, LATEST_UNIVERSAL)
    return files.notes


class _UniversalFiles(DeepSpeedFiles):
    """The files of one universal checkpoint."""

    def __init__(
        self, source: Source, settings: DeepSpeedSettings, config: dict[str, Any], row_parallel: Sequence[str]
    ) -> None:
        if files_of_experts(source.about.parameters):
            raise CheckpointError(
                "it has experts of DeepSpeed's MoE layer, and they are not written in its universal format.",
                where=source.about.path,
                do="convert to deepspeed, for a run with data- and expert-parallel ranks.",
                code="checkpoint-format",
            )
        super().__init__(source, settings, config)
        if settings.stage == 3 and not set(self._kinds) >= _ADAM:
            raise self._unfit("at stage 3 DeepSpeed loads the state of Adam only from its universal format")
        self._is_row = [_compiled(pattern) for pattern in row_parallel]
        for pattern in self._is_row:
            fits = [name for name in self._trained if pattern.fullmatch(name)]
            if not fits or any(len(source.about.parameters[name].shape) < 2 for name in fits):
                what = "fits a parameter of one dim" if fits else "fits no trained parameter"
                raise _wrong_pattern(f"--row-parallel {pattern.pattern!r} {what}.")
        optimizer = config.get("optimizer") or {}
        # DeepSpeed assigns the step as it is: its own optimizers need an integer, PyTorch's a tensor.
        self._is_own = bool(optimizer) and not (optimizer.get("params") or {}).get("torch_adam", False)
        untrained = [name for name in self._weights if name not in self._trained]
        if untrained:
            self.notes.append(
                f"DeepSpeed restores trained parameters only from this format: {listed(untrained, 4)} are in the model"
                " file's 'module', for the script to load."
            )
        numbers = [{key: value for key, value in group.items() if key != "params"} for group in self._groups()]
        if settings.stage == 3 and any(each != numbers[0] for each in numbers):
            self.notes.append("at stage 3 DeepSpeed gives the first group's hyperparameters to all groups.")

    def write(self, storage: Storage, folder: str) -> None:
        prefix = "zero_pp_rank_0_" if self._settings.stage == 3 else ""
        self._write(storage, [f"{folder}/{prefix}mp_rank_00_model_states.pt"], [self._model(0)])
        state = {**self._global_state(), "zero_stage": self._settings.stage, "ds_version": VERSION}
        state |= {"param_groups": self._groups()}
        steps = {index: self._numbers_of(numbers) for index, numbers in enumerate(self._steps) if numbers}
        if self._settings.stage == 3:
            state["optimizer_state_dict"] = {"state": steps, "param_groups": self._groups()}
        storage.make_folder(f"{folder}/{UNIVERSAL}")
        self._write(storage, [f"{folder}/{UNIVERSAL}/optimizer_state.pt"], [state])
        for index, layout in enumerate(self._layouts):
            for name in layout.shapes:
                place = f"{folder}/{UNIVERSAL}/{name}"
                storage.make_folder(place)
                for kind in (MODEL, *self._kinds):
                    file = "fp32" if kind == MODEL else kind.removeprefix(OPTIMIZER)
                    if layout.shapes.keys() & self._source.tensors(kind).keys():
                        self._write(storage, [f"{place}/{file}.pt"], [self._entry(kind, name)])
                if "step" in steps.get(index, {}) and self._settings.stage < 3:
                    self._write(storage, [f"{place}/step.pt"], [steps[index]["step"]])
                storage.flush_folder(place)
        storage.flush_folder(f"{folder}/{UNIVERSAL}")

    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._base_state(0)["param_groups"]
        return groups

    def _numbers_of(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: value if self._is_own else torch.tensor(float(value), dtype=torch.float32, device="cpu")
            for key, value in numbers.items()
        }

    def _entry(self, kind: str, name: str) -> dict[str, Any]:
        """Of a parameter that never had a gradient the state is zeros, as DeepSpeed's is."""
        shape = self._about.parameters[name].shape
        is_stored = name in self._source.tensors(kind)

        def read() -> torch.Tensor:
            return (
                self._source.read(kind, name).float()
                if is_stored
                else torch.zeros(shape, dtype=torch.float32, device="cpu")
            )

        is_row = any(pattern.fullmatch(name) for pattern in self._is_row)
        return {"cat_dim": int(is_row), "param": DeferredTensor(TensorInfo(torch.float32, shape), read)}


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise _wrong_pattern(f"--row-parallel {pattern!r} is no regular expression: {error}.") from None


def _wrong_pattern(what: str) -> CheckpointError:
    do = "give a pattern that fits whole names of weights that the model splits along dim 1."
    return CheckpointError(what, do=do, code="checkpoint-format")


@dataclass(frozen=True)
class UniversalResult:
    """What ``make_universal`` did.

    Args:
        format: of the input: ``"shoal"`` or ``"deepspeed"``.
        linked, copied: how many files have a second name now, and how many were copied.
        notes: what was found and is not kept, a sentence each.
    """

    format: str
    linked: int = 0
    copied: int = 0
    notes: tuple[str, ...] = ()


def make_universal(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> UniversalResult:
    """Make ``target`` of ``source``, and let ``latest_universal`` next to it name it.

    Args:
        source: a tag's folder, or the folder around it, whose newest is taken.
        target: the folder to make. A checkpoint that is there is replaced once the new one is whole.

    Raises: CheckpointError: the source is no checkpoint of the two kinds, or damaged, or the target is something else.
    """
    root, name = split(target)
    storage = open_storage(root)
    if not name or not directory.is_name(name):
        raise CheckpointError(f"{os.fspath(target)!r} does not name a folder.", code="checkpoint-target")
    source_format = detect(source)
    if source_format == "shoal":
        made = _twin(ShoalSource(source), storage, name)
    elif source_format == "deepspeed":
        opened = open_source(source, format=source_format)
        write_shoal(opened, root, name, is_for_resuming=False)
        made = UniversalResult(source_format, notes=tuple(opened.about.notes))
    else:
        raise CheckpointError(
            f"{os.fspath(source)} is {source_format}, not a checkpoint.",
            do="name a tag's folder of a checkpoint; `shoal convert` takes other formats.",
            code="checkpoint-format",
        )
    storage.replace(directory.LATEST_UNIVERSAL, name.encode())
    return made


def _twin(source: ShoalSource, storage: Storage, name: str) -> UniversalResult:
    origin = source.storage
    if not isinstance(origin, LocalStorage) or not isinstance(storage, LocalStorage):
        raise CheckpointError(
            f"{origin.url} or {storage.url} is no folder of a file system, so no file gets a second name there.",
            do="load the checkpoint itself: it loads in every layout.",
            code="checkpoint-storage",
        )
    folder = origin.root / source.folder
    if folder.resolve() == (storage.root / name).resolve():
        raise CheckpointError(
            f"{folder} is both the input and the output.",
            do=f"name another output, as {folder.name}_universal next to it.",
            code="checkpoint-target",
        )
    files = [*(folder / record.name for record in source.manifest.files), *_of_deepspeed(folder)]
    commit = Commit(storage, name)
    try:
        storage.make_folder("")
        is_near = os.stat(folder).st_dev == os.stat(storage.root).st_dev
        commit.begin(0 if is_near else source.manifest.nbytes)
        place = storage.root / commit.folder
        linked = _take(files, place)
        manifest = source.manifest.model_copy(update={"tag": name, "is_for_resuming": False})
        commit.publish(manifest, Retention(), save_latest=False)
    except OSError as error:
        raise CheckpointError(
            f"{name} could not be made: {error}.", where=storage.url, code="checkpoint-storage"
        ) from error
    finally:
        commit.end()
    return UniversalResult("shoal", linked, len(files) - linked)


def _of_deepspeed(folder: Path) -> Iterable[Path]:
    """Files of DeepSpeed's layout in a checkpoint's folder."""
    return (path for path in sorted(folder.iterdir()) if DEEPSPEED.file.fullmatch(path.name) and path.is_file())


def _take(files: Iterable[Path], place: Path) -> int:
    """Hard-link each file, or copy it where the file system cannot. Returns: how many are linked."""
    linked = 0
    for file in files:
        try:
            os.link(file, place / file.name, follow_symlinks=False)
            linked += 1
        except OSError:  # another file system, one without links, or as many as it can have
            with file.open("rb") as old, (place / file.name).open("xb") as new:
                shutil.copyfileobj(old, new, 1 << 20)
                new.flush()
                os.fsync(new.fileno())
    return linked
