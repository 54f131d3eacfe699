"""Writes a checkpoint that DeepSpeed resumes from, at ZeRO stages 1 to 3, for any number of ranks.

    FOLDER/latest                                                   the tag
    FOLDER/TAG/mp_rank_00_model_states.pt                           stages 1 and 2: weights, counters, client state
    FOLDER/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt            stage 3: the same, without trained weights
    FOLDER/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt     rank R's part of the optimizer
    FOLDER/TAG/layer_L_expert_E_mp_rank_00_model_states.pt          weights of an expert (``experts``)

The files are those of 0.19.8. What depends on the configuration of the run that will load them (the dtype, the order
in flat tensors, the rules of the loss scale) is taken from it. The files of all ranks are written together, so that
each tensor is read once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.formats.target import new_folder
from shoal.checkpoint.formats.torch_file_writing import ClassInstance, DeferredTensor, TorchFile
from shoal.checkpoint.manifest import MODEL, OPTIMIZER
from shoal.checkpoint.portable import Source, TensorInfo
from shoal.checkpoint.storage import Storage
from shoal.compat.checkpoints.experts import files_of_experts, layout_of_experts
from shoal.compat.checkpoints.layout import (
    DeepSpeedSettings,
    FlatLayout,
    parallel_keys,
    partitioned,
    settings_of,
    spread,
)
from shoal.compat.checkpoints.model_file import RESERVED
from shoal.errors import CheckpointError, NotBuiltError
from shoal.text import listed

VERSION = "0.19.8"  # whose files these are
_CHUNK = 1 << 20


def write_deepspeed(
    source: Source,
    folder: str | os.PathLike[str],
    *,
    num_ranks: int | None = None,
    stage: int | None = None,
    config: Mapping[str, Any] | None = None,
    tag: str | None = None,
) -> list[str]:
    """Write model, optimizer, counters, schedule, loss scale and client state as DeepSpeed 0.19.8 saves them.

    Tensors that several ranks of Shoal's held a part of are whole in ``source``, so the target has data-parallel ranks
    only, and as many expert-parallel ones as the optimizer's groups of experts name (``ep_size_2``).

    Args:
        num_ranks: data-parallel ranks of the run that loads it; None: as many as saved the source.
        stage: its ZeRO stage; None: that of ``config``.
        config: its DeepSpeed configuration; None: that of the run that saved the source.
        tag: None: ``global_step`` and the number of steps.

    Returns: a sentence for each thing that DeepSpeed cannot hold as it is.
    Raises:
        CheckpointError: the folder is there already, or the source holds what such files cannot.
        NotBuiltError: the optimizer updates whole matrices.
    Memory: one tensor.
    """
    about = source.about
    chosen = dict(about.config if config is None else config)
    settings = settings_of(chosen, stage, num_ranks if num_ranks is not None else about.num_ranks or 1, about)
    files = DeepSpeedFiles(source, settings, chosen)
    if keys := parallel_keys(chosen):
        files.notes.append(
            f"the files are for data-parallel ranks: leave {listed(keys)} out of the configuration that loads them, or"
            " convert to deepspeed_universal."
        )
    files.save(folder, tag, "latest")
    return files.notes


@dataclass(frozen=True)
class _FlatTensor:
    """One kind of state of a flat layout.

    Args:
        pads: the layout's padding is in the file.
    """

    kind: str
    layout: FlatLayout
    pads: bool
    dtype: torch.dtype = torch.float32

    def numel(self, rank: int) -> int:
        return self.layout.numel(rank) + (self.layout.paddings[rank] if self.pads else 0)


class DeepSpeedFiles:
    """The files of one checkpoint."""

    def __init__(self, source: Source, settings: DeepSpeedSettings, config: dict[str, Any]) -> None:
        self.notes: list[str] = []
        self._source, self._settings = source, settings
        self._about = about = source.about
        zero = {**(config.get("zero_optimization") or {}), "stage": settings.stage}
        self._config = {**config, "zero_optimization": zero}
        self._weights = source.tensors(MODEL)
        self._kinds = [kind for kind in source.kinds() if kind.startswith(OPTIMIZER)]
        self._expert_files = files_of_experts(about.parameters)
        self._experts = {name for names in self._expert_files.values() for name in names}
        self._check()
        self._numbers: list[int] = []  # of the optimizer's groups that have members
        self._layouts: list[FlatLayout] = []
        for number in range(len(about.groups)):
            members = {
                name: tuple(about.parameters[name].shape)
                for name, group in about.group_of.items()
                if group == number and 0 not in about.parameters[name].shape
            }
            if members:
                self._layouts += self._laid_out(len(self._numbers), members, about.groups[number])
                self._numbers.append(number)
        self._trained = {name for layout in self._layouts for name in layout.shapes}
        self._flats: dict[int, tuple[_FlatTensor, DeferredTensor]] = {}  # by ``id`` of rank 0's tensor, kept alive
        self._steps = [self._scalars(layout) for layout in self._layouts]

    def _laid_out(
        self, group: int, members: Mapping[str, tuple[int, ...]], numbers: Mapping[str, Any]
    ) -> list[FlatLayout]:
        settings = self._settings
        if settings.stage == 3:
            return spread(group, members, settings.num_ranks, settings.sub_group_size)
        alignment, is_dealt = settings.param_alignment, settings.is_round_robin
        if self._experts.isdisjoint(members):
            return [partitioned(group, members, settings.num_ranks, param_alignment=alignment, is_round_robin=is_dealt)]
        layout = layout_of_experts(group, members, numbers, self._experts, settings)
        if layout is None:
            raise self._unfit(
                f"group {group} of the optimizer, {numbers.get('name')!r}, has experts and others, or experts that"
                f" {settings.num_ranks} ranks cannot share; DeepSpeed's split_params_into_different_moe_groups_for_"
                "optimizer makes groups of experts alone"
            )
        return [layout]

    def _check(self) -> None:
        about = self._about
        if not about.group_of:
            raise CheckpointError(
                f"{about.path} has weights but no optimizer parameter groups, which DeepSpeed needs to resume.",
                do="convert to huggingface or state_dict, and load the weights into the model before initialize().",
                code="checkpoint-format",
            )
        if self._experts and self._settings.stage == 3:
            raise self._unfit("DeepSpeed trains experts at stages 0 to 2, and the stage is 3")
        if frozen := sorted(self._experts - about.group_of.keys()):
            raise self._unfit(f"{listed(frozen, 4)} are experts' and frozen, which DeepSpeed does not save")
        if "muon" in (about.optimizer or "").lower():
            raise NotBuiltError(
                f"DeepSpeed's files of {about.optimizer} are not written yet.",
                where=about.path,
                do="convert to huggingface or state_dict, which give the weights.",
                code="not-built",
            )
        for name in about.group_of:
            shape = about.parameters[name].shape
            for kind in (MODEL, *self._kinds):
                info = self._source.tensors(kind).get(name)
                if info is None and kind == MODEL:
                    raise self._unfit(f"the weights of {name} are not in it")
                if info is not None and info.shape != shape:
                    raise self._unfit(f"{kind} of {name} is {list(info.shape)}, and {name} is {list(shape)}")
        if taken := sorted(RESERVED & about.client_state.keys()):
            raise self._unfit(
                f"the client state has {listed(map(repr, taken), 4)}, which DeepSpeed's file has of its own"
            )

    def _unfit(self, what: str) -> CheckpointError:
        do = "convert to shoal, dcp or huggingface, which keep it as it is."
        return CheckpointError(f"{what}.", where=self._about.path, do=do, code="checkpoint-format")

    def _scalars(self, layout: FlatLayout) -> dict[str, Any]:
        """The optimizer's state of one number, which DeepSpeed holds once for a flat tensor."""
        scalars = {name: self._about.scalars[name] for name in layout.shapes if self._about.scalars.get(name)}
        if not scalars:
            return {}
        most = max(scalars, key=lambda name: float(scalars[name].get("step", 0)))
        others = [name for name in layout.shapes if _plain(scalars.get(name, {})) != _plain(scalars[most])]
        if others:
            step = f"step {int(scalars[most]['step'])}" if "step" in scalars[most] else "one value"
            self.notes.append(
                f"DeepSpeed has {step} for all parameters of a group; {listed(others, 4)} had another, or none, and"
                f" take that of {most}."
            )
        # DeepSpeed's own optimizers need an integer; torch's take it too.
        return {key: int(value) if key == "step" else value for key, value in scalars[most].items()}

    # what the files hold

    def save(self, folder: str | os.PathLike[str], tag: str | None, latest: str) -> None:
        """Write the files of ``tag``, and its name into the file ``latest``."""
        tag = tag if tag is not None else f"global_step{self._about.counters.get('global_steps', 0)}"
        with new_folder(folder) as (storage, staging):
            storage.make_folder(f"{staging}/{tag}")
            self.write(storage, f"{staging}/{tag}")
            storage.flush_folder(f"{staging}/{tag}")
            with storage.create(f"{staging}/{latest}") as sink:
                sink.write(memoryview(tag.encode()))
                sink.flush()

    def write(self, storage: Storage, folder: str) -> None:
        settings = self._settings
        ranks = range(settings.num_ranks)
        prefix = "bf16_" if settings.dtype == torch.bfloat16 else ""
        model = [self._model(rank) for rank in (ranks if settings.stage == 3 else range(1))]
        rank_of = "zero_pp_rank_{}_" if settings.stage == 3 else ""
        names = [f"{folder}/{rank_of.format(rank)}mp_rank_00_model_states.pt" for rank in range(len(model))]
        self._write(storage, names, model)
        names = [f"{folder}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in ranks]
        state_of = self._spread_state if settings.stage == 3 else self._partitioned_state
        about = {"ds_config": self._config, "ds_version": VERSION}
        self._write(storage, names, [{"optimizer_state_dict": state_of(rank), **about} for rank in ranks])
        for (layer, expert), members in self._expert_files.items():
            name = f"{folder}/layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
            self._write(storage, [name], [{each: self._deferred(each, is_parameter=True) for each in members}])

    def _model(self, rank: int) -> dict[str, Any]:
        about, settings = self._about, self._settings
        is_spread = settings.stage == 3
        module: dict[str, Any] = {}
        for name, info in self._weights.items():
            if name in self._experts:
                continue
            is_parameter = name in about.parameters
            tensor: Any = torch.empty(0, dtype=self._dtype_of(info), device="cpu")
            if not is_parameter or not is_spread:
                tensor = self._deferred(name, is_parameter)
            module |= dict.fromkeys((name, *about.aliases.get(name, ())), tensor)
        frozen = [name for name in about.parameters if name not in self._trained]
        if absent := [name for name in frozen if name not in self._weights]:
            self.notes.append(f"frozen parameters are not in the source, and so not written: {listed(absent, 4)}.")
        has_frozen = settings.stage > 1 and not absent
        state = {
            "module": module,
            "buffer_names": [name for name in self._weights if name not in about.parameters],
            "optimizer": None,
            "param_shapes": [
                {name: torch.Size(shape) for name, shape in layout.first_shapes().items()} for layout in self._layouts
            ],
            "frozen_param_shapes": {n: torch.Size(about.parameters[n].shape) for n in frozen} if has_frozen else None,
            "shared_params": {other: name for name, others in about.aliases.items() for other in others if not rank},
            "frozen_param_fragments": {name: self._fragment(name, rank) for name in frozen} if has_frozen else None,
            "lr_scheduler": about.schedule,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": about.counters.get("skipped_steps", 0),
            "global_steps": about.counters.get("global_steps", 0),
            "dp_world_size": settings.num_ranks,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": self._config,
            "ds_version": VERSION,
            **about.client_state,
        }
        if self._experts:
            layers = [layer for layer, _ in self._expert_files]
            state["num_experts"] = [layers.count(layer) for layer in dict.fromkeys(layers)]
            state["ds_autoep_layers"] = None
        if "global_samples" in about.counters:
            state["global_samples"] = about.counters["global_samples"]
        return state

    def _partitioned_state(self, rank: int) -> dict[str, Any]:
        layouts = self._layouts
        return {
            **self._global_state(),
            "base_optimizer_state": self._base_state(rank),
            "single_partition_of_fp32_groups": [self._flat(MODEL, layout, rank) for layout in layouts],
            "zero_stage": self._settings.stage,
            "group_paddings": [layout.paddings[rank] for layout in layouts],
            "param_alignment_paddings": [layout.gaps for layout in layouts],
            "partition_count": [layout.num_ranks for layout in layouts],
            "ds_version": VERSION,
            "param_slice_mappings": [
                {name: _address(start, numel) for name, (start, numel) in layout.addresses(rank).items()}
                for layout in layouts
            ],
        }

    def _spread_state(self, rank: int) -> dict[str, Any]:
        return {
            "zero_stage": 3,
            **self._global_state(),
            "partition_count": self._settings.num_ranks,
            "optimizer_state_dict": self._base_state(rank),
            "fp32_flat_groups": [self._flat(MODEL, layout, rank) for layout in self._layouts],
        }

    def _global_state(self) -> dict[str, Any]:
        settings = self._settings
        clip = {} if settings.clip_grad is None or settings.stage == 3 else {"clip_grad": settings.clip_grad}
        scaler = settings.loss_scaler(self._about.loss_scale)
        return {"loss_scaler": scaler, "dynamic_loss_scale": settings.is_dynamic, "overflow": False, **clip}

    def _base_state(self, rank: int) -> dict[str, Any]:
        """The optimizer's ``state_dict()``: it has one parameter for each flat tensor."""
        state = {}
        for index, (layout, numbers) in enumerate(zip(self._layouts, self._steps, strict=True)):
            kinds = [kind for kind in self._kinds if layout.shapes.keys() & self._source.tensors(kind).keys()]
            tensors = {kind.removeprefix(OPTIMIZER): self._flat(kind, layout, rank) for kind in kinds}
            if numbers or tensors:
                state[index] = {**numbers, **tensors}
        groups = []
        for position, number in enumerate(self._numbers):
            members = [index for index, layout in enumerate(self._layouts) if layout.group == position]
            # DeepSpeed's own Adam looks for this key; torch's ignores it.
            adams = {"bias_correction": True} if f"{OPTIMIZER}exp_avg_sq" in self._kinds else {}
            groups.append({**adams, **self._about.groups[number], "params": members})
        return {"state": state, "param_groups": groups}

    # tensors

    def _dtype_of(self, info: TensorInfo) -> torch.dtype:
        return self._settings.dtype if info.dtype.is_floating_point else info.dtype

    def _deferred(self, name: str, is_parameter: bool) -> DeferredTensor:
        info = self._weights[name]
        dtype = self._dtype_of(info) if is_parameter else info.dtype
        return DeferredTensor(TensorInfo(dtype, info.shape), lambda: self._source.read(MODEL, name).to(dtype))

    def _fragment(self, name: str, rank: int) -> DeferredTensor:
        """A frozen parameter, or a rank's part of it at stage 3."""
        if self._settings.stage < 3:
            return self._deferred(name, is_parameter=True)
        info = self._weights[name]
        (layout,) = spread(0, {name: info.shape}, self._settings.num_ranks, sub_group_size=1)
        return self._deferred_flat(_FlatTensor(MODEL, layout, pads=False, dtype=self._dtype_of(info)), rank)

    def _flat(self, kind: str, layout: FlatLayout, rank: int) -> DeferredTensor:
        return self._deferred_flat(_FlatTensor(kind, layout, pads=kind != MODEL), rank)

    def _deferred_flat(self, flat: _FlatTensor, rank: int) -> DeferredTensor:
        def refuse() -> torch.Tensor:
            raise AssertionError("flat tensors of all ranks are written together")

        deferred = DeferredTensor(TensorInfo(flat.dtype, (flat.numel(rank),)), refuse)
        if rank == 0:
            self._flats[id(deferred)] = flat, deferred
        return deferred

    # writing

    def _write(self, storage: Storage, names: Sequence[str], values: Sequence[Any]) -> None:
        """Write the same file of each rank: their tensors are of the same kinds, in the same order."""
        with ExitStack() as open_sinks:
            sinks = [open_sinks.enter_context(storage.create(name)) for name in names]
            with ExitStack() as open_files:
                pairs = zip(sinks, values, strict=True)
                files = [open_files.enter_context(TorchFile(sink, value)) for sink, value in pairs]
                for column in zip(*(file.tensors for file in files), strict=True):
                    if id(column[0]) in self._flats:
                        self._write_flat(self._flats[id(column[0])][0], files)
                        continue
                    for file, tensor in zip(files, column, strict=True):
                        file.add(tensor.read() if isinstance(tensor, DeferredTensor) else tensor)
            for sink in sinks:
                sink.flush()

    def _write_flat(self, flat: _FlatTensor, files: Sequence[TorchFile]) -> None:
        """Read each of its parameters once, and append its parts to the ranks' files."""
        with ExitStack() as entries:
            appends = [
                entries.enter_context(file.next_tensor(flat.numel(rank) * flat.dtype.itemsize))
                for rank, file in enumerate(files)
            ]
            current: tuple[str, torch.Tensor] | None = None
            stored = self._source.tensors(flat.kind)
            for piece in flat.layout.pieces:
                name = piece.name
                if name is None or name not in stored:  # of a parameter that never had a gradient there is no state
                    _append_zeros(appends[piece.rank], piece.numel, flat.dtype)
                    continue
                if current is None or current[0] != name:
                    current = name, self._source.read(flat.kind, name).reshape(-1).to(flat.dtype)
                appends[piece.rank](current[1][piece.start : piece.start + piece.numel])
            if flat.pads:
                for rank, numel in enumerate(flat.layout.paddings):
                    _append_zeros(appends[rank], numel, flat.dtype)


def _append_zeros(append: Callable[[torch.Tensor], None], numel: int, dtype: torch.dtype) -> None:
    for start in range(0, numel, _CHUNK):
        append(torch.zeros(min(_CHUNK, numel - start), dtype=dtype, device="cpu"))


def _address(start: int, numel: int) -> ClassInstance:
    return ClassInstance("deepspeed.utils.tensor_fragment", "fragment_address", {"numel": numel, "start": start})


def _plain(scalars: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in scalars.items()}
