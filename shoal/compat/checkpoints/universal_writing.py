"""Writes DeepSpeed's universal format, from which its runs with tensor or pipeline parallelism resume too.

    FOLDER/latest_universal                                     the tag
    FOLDER/TAG/[zero_pp_rank_0_]mp_rank_00_model_states.pt      weights, counters, client state; the prefix at stage 3
    FOLDER/TAG/zero/optimizer_state.pt                          the groups' hyperparameters, the loss scale
    FOLDER/TAG/zero/NAME/{fp32,exp_avg,...,step}.pt             of a trained parameter, whole

A rank of the run that loads it takes its part of each file: with AutoTP by the layers' own description, of a pipeline
what the stage has, of a model that splits its own tensors along the dim that the file names (``cat_dim``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.checkpoint.directory import LATEST_UNIVERSAL
from shoal.checkpoint.formats.torch_writing import DeferredTensor
from shoal.checkpoint.manifest import MODEL, OPTIMIZER
from shoal.checkpoint.portable import Source, TensorInfo
from shoal.checkpoint.storage import Storage
from shoal.compat.checkpoints import UNIVERSAL
from shoal.compat.checkpoints.experts import files_of_experts
from shoal.compat.checkpoints.settings import DeepSpeedSettings, settings_of
from shoal.compat.checkpoints.writing import VERSION, DeepSpeedFiles
from shoal.errors import CheckpointError
from shoal.text import listed

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
    dtypes = (about.parameters[name].dtype for name in about.group_of if name in about.parameters)
    files = _UniversalFiles(source, settings_of(chosen, stage, 1, dtypes), chosen, row_parallel)
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
        beside = [name for name in self._weights if name not in self._trained]
        if beside:
            self.notes.append(
                f"DeepSpeed restores trained parameters only from this format: {listed(beside, 4)} are in the model"
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
        return {key: value if self._is_own else torch.tensor(float(value)) for key, value in numbers.items()}

    def _entry(self, kind: str, name: str) -> dict[str, Any]:
        """Of a parameter that never had a gradient the state is zeros, as DeepSpeed's is."""
        shape = self._about.parameters[name].shape
        is_stored = name in self._source.tensors(kind)

        def read() -> torch.Tensor:
            return self._source.read(kind, name).float() if is_stored else torch.zeros(shape)

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
