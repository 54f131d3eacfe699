"""Reads DeepSpeed's own checkpoints (ZeRO stages 0 to 3, any number of ranks), so that a run continues in Shoal.

    parameter          weights from                        its dtype in About.parameters
    trained            the optimizer's fp32 master         the model's (bf16, fp16 or fp32)
    .. universal       zero/NAME/fp32.pt                   the model's
    frozen, a buffer   the model file, as it is            the model's
    tied               once, under its first name          the others are About.aliases
    experts of AutoEP  the same, under the names, and in the layout, that they had in the model

Of a tensor-parallel run each tensor is joined from the ranks' parts (``tensor_parallel``); of a pipeline the
stages are joined first (``pipeline``).
DeepSpeed is not imported, and nothing of the files is run: see ``files`` for what they may ask for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shoal.checkpoint.foreign import Shapes
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.portable import About, TensorInfo
from shoal.compat.checkpoints.autoep import (
    AutoEpLayer,
    layers_of,
    of_expert,
    rank_names,
    rank_tensors,
    split_into_experts,
    spread_holders,
    under,
    without_copies,
)
from shoal.compat.checkpoints.autoep_names import ModelNames
from shoal.compat.checkpoints.experts import (
    ep_sizes,
    files_of_experts,
    holders_of,
    in_order_of_experts,
    is_experts,
    local_names,
    of_first_expert,
    read_experts,
    read_unnamed_experts,
)
from shoal.compat.checkpoints.files import (
    CheckpointFiles,
    Turns,
    find_files,
    not_built,
    not_saved,
    open_file,
)
from shoal.compat.checkpoints.layout import in_given_order
from shoal.compat.checkpoints.model_file import ModelFile
from shoal.compat.checkpoints.pipeline import read_stages
from shoal.compat.checkpoints.state import (
    EqualParts,
    FlatState,
    Holders,
    NamedState,
    StateTensor,
    Tensors,
    damaged,
    entry,
    held_by_all,
    merged,
    read_partitioned,
    read_spread,
)
from shoal.compat.checkpoints.tensor_parallel import PartJoin, TensorParallelLayout, undescribed
from shoal.compat.checkpoints.universal import read_universal
from shoal.compat.checkpoints.unnamed import read_replaced, read_unnamed
from shoal.errors import CheckpointError, NotBuiltError, ShoalError

# By how much copies of an expert's tensor may differ, as a part of its largest value: each rank updates its own.
_MAX_ROUNDING = 0.02


class DeepSpeedSource:
    """A checkpoint that DeepSpeed's ``save_checkpoint`` wrote, as a ``Source``.

    Args:
        folder: what was given to ``save_checkpoint``, or a tag's folder in it.
        tag: which checkpoint; None: the one that ``latest`` names.
        names: of each parameter group, the names of its parameters in the optimizer's order. Only stage 0 can need it
            (it saves no names), and says so; ``()`` leaves the optimizer's state out there.
        verify: compare the checksums in all files first, which reads them once more, and the copies of experts that
            tensor-parallel ranks have.
        rank, size: of several processes that open it together each compares its share of the files.
        model: the tensors of the model that it is for, by name; it says how experts of AutoEP lay in the model.

    Memory: what a file has in addition to its tensors; those are mapped, and read when needed.

    Raises:
        CheckpointError: it is missing, damaged, or asks for a class that a checkpoint of DeepSpeed's does not need.
        NotBuiltError: it was offloaded to NVMe, or is of another kind that is not read.
    """

    about: About

    def __init__(
        self,
        folder: str | os.PathLike[str],
        tag: str | None = None,
        *,
        names: Sequence[Sequence[str]] | None = None,
        verify: bool = True,
        rank: int = 0,
        size: int = 1,
        model: Shapes | None = None,
    ) -> None:
        files = find_files(folder, tag)
        turns = Turns(verify=verify, rank=rank, size=size)
        try:
            first = _RankFiles(files[0], len(files), names, turns, model=model)
            # Below stage 3 DeepSpeed says in the first rank's file alone which weights are tied.
            aliases = first.module.aliases
            others = (_RankFiles(each, len(files), names, turns, aliases, model) for each in files[1:])
            self._take([first, *others], turns)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, ShoalError):
                raise
            # A value of another type than DeepSpeed writes.
            raise damaged(f"{type(error).__name__}: {error}", str(files[0].folder)) from error

    def _take(self, parts: list[_RankFiles], turns: Turns) -> None:
        first = parts[0]
        self._tensors = first.tensors if len(parts) == 1 else _joined(parts, turns)
        self._list()
        self.about = first.module.about(self._infos[MODEL], first.trained, first.scale)
        self.about.num_ranks, self.about.path = first.size * len(parts), str(first.folder)
        if (self.about.config.get("zero_optimization") or {}).get("round_robin_gradients") and not first.is_universal:
            self.about.group_of = in_given_order(self.about.group_of, first.size)
        if first.own_names is not None:
            self._tensors = {kind: first.own_names.tensors(tensors) for kind, tensors in self._tensors.items()}
            self._list()
            first.own_names.rename(self.about)

    def _list(self) -> None:
        self._infos = {
            kind: {name: tensor.info for name, tensor in tensors.items()} for kind, tensors in self._tensors.items()
        }

    def kinds(self) -> Iterable[str]:
        return list(self._infos)

    def tensors(self, kind: str) -> Mapping[str, TensorInfo]:
        return self._infos.get(kind, {})

    def read(self, kind: str, name: str) -> torch.Tensor:
        if name not in self.tensors(kind):
            raise KeyError(f"{kind} has no tensor {name!r}")
        return self._tensors[kind][name].read()


class _RankFiles:
    """What the files of one tensor-parallel rank hold."""

    def __init__(
        self,
        files: CheckpointFiles,
        num_parts: int,
        names: Sequence[Sequence[str]] | None,
        turns: Turns,
        aliases: dict[str, tuple[str, ...]] | None = None,
        model: Shapes | None = None,
    ) -> None:
        self.folder, self.is_universal = files.folder, files.universal is not None
        self._frozen: FlatState | None = None
        self.whole_experts: Collection[str] = ()  # of which the other tensor-parallel ranks have nothing
        self.trained: NamedState | None
        self.own_names: ModelNames | None = None
        if files.stages:
            self.module, self.trained, self.scale, self.size = read_stages(files, names, turns, _trained)
            if layers_of(self.module.state, self.module.file, num_parts):
                raise not_built("experts of AutoEP in pipeline stages", self.module.file)
            self._compare_number(num_parts)
            self._collect()
            return
        state, file = open_file(files.model[0], verify=turns.take()), str(files.model[0])
        layers = layers_of(state, file, 1 if self.is_universal else num_parts)
        if layers and isinstance(state.get("module"), Mapping):
            state["module"] = without_copies(state["module"], layers)
        experts = {}
        if layers and (files.is_stage_3 or self.is_universal):  # they are where the optimizer's state is
            experts = _placeholders(state, layers)
            self.whole_experts = experts.keys() if layers[0].step > 1 else frozenset()
        elif not self.is_universal:  # there they are parameters like others
            experts = read_experts(files, state.get("num_experts"), turns, layers)
            self.whole_experts = experts.keys() if files.elsewhere else frozenset()
        self.module = ModelFile(state, file, is_stage_3=files.is_stage_3, aliases=aliases, experts=experts)
        if layers:
            infos = {name: TensorInfo(each.dtype, tuple(each.shape)) for name, each in self.module.tensors.items()}
            self.own_names = ModelNames(layers, state.get("ds_config"), infos, model, file)
        self._compare_number(num_parts)
        size = self.size = int(state.get("dp_world_size") or max(1, len(files.optimizer)))
        if size < 1:
            raise damaged(f"{size} ranks saved it", file)
        if files.is_stage_3:
            self._frozen = _frozen(files, state, size, self.module.notes, turns)
        if files.universal is None:
            self.trained, self.scale = _trained(files, self.module, size, names, turns, layers, self.own_names)
        else:
            trained, self.scale = read_universal(files.universal, self.module, turns, layers)
            self.trained = trained
            number = sum(map(int, state.get("num_experts") or ()))
            if not layers and number != len(files_of_experts(trained.group_of)):
                raise not_built(
                    f"{number} experts in the universal format, without all of their weights", self.module.file
                )
        self._collect()

    def _compare_number(self, num_parts: int) -> None:
        """Raises: CheckpointError: files of another number of tensor-parallel ranks are here than saved them."""
        saved = self.module.num_parts
        if saved != num_parts and not self.is_universal:
            what = f"{saved} tensor-parallel ranks saved it, and files of {num_parts} are here."
            raise not_saved(what, self.folder, has_experts=bool(self.module.experts))

    def _collect(self) -> None:
        trained = {} if self.trained is None else {kind: self.trained.tensors[kind] for kind in self.trained.kinds()}
        frozen = {} if self._frozen is None else self._frozen.tensors.get(MODEL, {})
        weights = self.module.weights({**frozen, **trained.pop(MODEL, {})})
        self.tensors: dict[str, dict[str, StateTensor]] = {MODEL: weights, **trained}

    def take_experts(self, other: _RankFiles) -> None:
        """Tell of the experts that another tensor-parallel rank has whole, which are read from its files."""
        self.module.tensors.update({name: other.module.tensors[name] for name in other.whole_experts})
        if self.trained is not None and other.trained is not None:
            mine, others = self.trained, other.trained
            mine.group_of.update({name: at for name, at in others.group_of.items() if name in other.whole_experts})
            mine.scalars.update({name: each for name, each in others.scalars.items() if name in other.whole_experts})


def _placeholders(state: Mapping[str, Any], layers: Sequence[AutoEpLayer]) -> dict[str, torch.Tensor]:
    """Tensors without memory, of the router's dtype, in place of AutoEP's experts, which are in no model file."""
    shapes = {name: shape for members in state.get("param_shapes") or () for name, shape in members.items()}
    result = {}
    for layer in layers:
        router = state["module"].get(f"{under(layer.path)}router.gate.weight")
        for tensor in layer.tensors:
            if tensor in shapes and isinstance(router, torch.Tensor):
                empty = torch.empty(tuple(shapes[tensor])[1:], dtype=router.dtype, device="meta")
                result.update({of_expert(tensor, expert): empty for expert in layer.experts})
    return result


def _joined(parts: list[_RankFiles], turns: Turns) -> dict[str, dict[str, StateTensor]]:
    """The tensors of all tensor-parallel ranks."""
    joins = _joins(parts, turns)
    for part in parts[1:]:
        parts[0].take_experts(part)
    joined: dict[str, dict[str, StateTensor]] = {}
    for kind in parts[0].tensors:
        of_parts = [part.tensors[kind] for part in parts]
        for name, join in joins.items():
            dtype = next((tensors[name].info.dtype for tensors in of_parts if name in tensors), None)
            if dtype is not None:
                read = partial(join.join, partial(_read_part, of_parts, name))
                joined.setdefault(kind, {})[name] = StateTensor(TensorInfo(dtype, join.whole_shape), read)
    return joined


def _read_part(of_parts: Sequence[Tensors], name: str, part: int) -> torch.Tensor:
    return of_parts[part][name].read()


def _joins(parts: list[_RankFiles], turns: Turns) -> dict[str, PartJoin]:
    """How each tensor is joined.

    Raises: CheckpointError: the ranks do not have the same tensors, or copies of an expert's that differ.
    """
    module = parts[0].module
    shared = [{k: set(tensors).difference(part.whole_experts) for k, tensors in part.tensors.items()} for part in parts]
    for part, tensors in zip(parts, shared, strict=True):
        if tensors != shared[0]:
            raise damaged(f"it has other tensors than {module.file}", part.module.file)
    layout = TensorParallelLayout(module.state.get("universal_checkpoint_info"), len(parts), module.file)
    owners = {name: rank for rank, part in enumerate(parts) for name in part.whole_experts}
    split = files_of_experts(name for name in module.experts if name not in owners)
    for names in split.values():
        if not any(layout.describes(of_first_expert(name)) for name in names):
            what = f"experts are split over {len(parts)} tensor-parallel ranks, and no pattern or map fits {names[0]}"
            raise undescribed(what, module.file)
    joins = {}
    for name in in_order_of_experts(dict.fromkeys(name for part in parts for name in part.tensors[MODEL])):
        if name in owners:
            joins[name] = layout.whole_on(owners[name], parts[owners[name]].tensors[MODEL][name].info.shape)
            continue
        shapes = [part.tensors[MODEL][name].info.shape for part in parts]
        if name in module.buffers:  # not described; each rank saves its own
            joins[name] = layout.replicated(name, shapes)
        else:
            joins[name] = layout.join_of(_described(of_first_expert(name), layout, module), shapes)
    for names in split.values():
        if turns.take():
            _check_copies(parts, [name for name in names if {block.rank for block in joins[name].blocks} == {0}])
    return joins


def _described(name: str, layout: TensorParallelLayout, module: ModelFile) -> str:
    """The name under which AutoTP describes a weight: of a tied one, of which stage 0 saves a copy, the other one."""
    tensor = module.tensors.get(name)
    if tensor is None or layout.describes(name) or module.state.get("shared_params") is not None:
        return name
    same = (
        other
        for other, values in module.parameters().items()
        if other != name and values.shape == tensor.shape and layout.describes(other) and torch.equal(values, tensor)
    )
    return next(same, name)


def _check_copies(parts: list[_RankFiles], names: Iterable[str]) -> None:
    """True if the weights that all ranks have whole are the same. If they differ by rounding, one rank's are taken.

    Raises: CheckpointError: they are not.
    """
    for name in names:
        first, *others = (part.module.tensors[name].float() for part in parts)
        for rank, other in enumerate(others, start=1):
            if not first.numel() or other.shape != first.shape:  # a rank has none of a dim that is too small to split
                continue
            difference, largest = float((other - first).abs().max()), float(first.abs().max())
            if difference > _MAX_ROUNDING * largest:
                raise damaged(
                    f"{name} should be the same on every tensor-parallel rank, and rank {rank} has values that differ"
                    f" by {difference:.3g} (the largest is {largest:.3g})",
                    parts[rank].module.file,
                )


def _trained(
    files: CheckpointFiles,
    module: ModelFile,
    size: int,
    names: Sequence[Sequence[str]] | None,
    turns: Turns,
    layers: Sequence[AutoEpLayer] = (),
    own_names: ModelNames | None = None,
) -> tuple[NamedState | None, Any]:
    """The optimizer's state, and its loss scale. None: there is none.

    Args:
        layers, own_names: of AutoEP.
    """
    state = module.state.get("optimizer")
    if state is not None or files.experts_optimizer:
        if names is not None and not names:
            module.notes.append("The optimizer's state was left out, as requested.")
            return None, None
        if files.experts_optimizer:  # in fp32 the model file has the first one's once more
            return _of_experts(files, module, names, turns, layers, own_names)
        assert state is not None
        return read_unnamed(state, module.parameters(), names, module.file), state
    shapes = module.state.get("param_shapes")
    if not files.optimizer:
        if files.is_stage_3:
            raise damaged("there are no optimizer files, and at stage 3 the weights are in them", str(files.folder))
        module.notes.append("There are no optimizer files: the weights are the model's, without optimizer state.")
        return None, None
    paths, notes = files.optimizer_of(size)
    module.notes.extend(notes)
    if not isinstance(shapes, list):
        raise damaged("entry 'param_shapes' is missing", module.file)
    states = []
    for path in paths:
        opened = entry(open_file(path, verify=turns.take()), "optimizer_state_dict", str(path))
        count = entry(opened, "partition_count", str(path))
        counts = [int(each) for each in (count if isinstance(count, list) else [count])]
        if min(counts, default=1) < 1:
            raise damaged(f"the state is cut into {min(counts)} parts", str(path))
        if files.elsewhere and any(size % each for each in counts):
            raise NotBuiltError(
                f"each expert lies whole on one of {module.num_parts} tensor-parallel ranks, and ep_size is no multiple"
                " of this number: its optimizer state is divided among files of several of them.",
                where=str(path),
                do="load a copy of the folder without the *_optim_states.pt files, which gives the weights.",
                code="not-built",
            )
        if any(each != size and (not module.experts or size % each) for each in counts):
            raise CheckpointError(
                f"the state is cut into {counts[0]} parts, and {size} ranks saved it.",
                where=str(path),
                do="if two saves went to one tag, remove the older files; MiCS checkpoints cannot be read yet.",
                code="checkpoint-damaged",
            )
        if (opened.get("zero_stage", 0) == 3) != files.is_stage_3:
            raise damaged(f"it is of stage {int(opened['zero_stage'])}, and the model file is not", str(path))
        states.append(opened)
    where = [str(path) for path in paths]
    if files.is_stage_3:
        trained = read_spread(states, shapes, where, _spread(files, states, layers, turns, where))
    else:
        config = module.state.get("ds_config")
        first = isinstance(config, Mapping) and bool(config.get("use_data_before_expert_parallelism"))
        experts = module.experts
        if layers:
            of_ranks = rank_names(layers)
            holders = holders_of(lambda _: of_ranks, of_ranks[0].__contains__, size, counts, data_first=first)
        else:
            holders = holders_of(lambda ep: local_names(experts, ep), is_experts, size, counts, data_first=first)
        trained = read_partitioned(states, shapes, where, holders if module.experts else held_by_all(len(states)))
    split_into_experts(trained, layers, module.file)
    return trained, states[0].get("loss_scaler")


def _spread(
    files: CheckpointFiles,
    states: Sequence[dict[str, Any]],
    layers: Sequence[AutoEpLayer],
    turns: Turns,
    where: list[str],
) -> Holders:
    """Stage 3, of AutoEP: who holds parts of which experts, as each rank's model file says."""
    if not layers:
        return held_by_all(len(states))
    paths = files.model[1 : len(states)]
    step = layers[0].step
    others = [layers_of(open_file(path, verify=turns.take()), str(path), step) for path in paths]
    for path, other in zip(paths, others, strict=True):
        if [(each.path, each.experts_of) for each in other] != [(each.path, each.experts_of) for each in layers]:
            raise damaged(f"AutoEP's layers are others than in {files.model[0].name}", str(path))
    return spread_holders(states, [layers, *others], where)


def _of_experts(
    files: CheckpointFiles,
    module: ModelFile,
    names: Sequence[Sequence[str]] | None,
    turns: Turns,
    layers: Sequence[AutoEpLayer],
    own_names: ModelNames | None,
) -> tuple[NamedState, Any]:
    """Stage 0: the state of all expert-parallel ranks' optimizers, and the first one's loss scale."""
    ep_ranks = sorted(files.experts_optimizer)
    paths = [files.experts_optimizer[rank] for rank in ep_ranks]
    states = [entry(open_file(path, verify=turns.take()), "optimizer", str(path)) for path in paths]
    sizes = ep_sizes(states[0].get("optimizer_state_dict", states[0]).get("param_groups", ()))
    if len(sizes) > 1:
        raise not_built("MoE layers of several expert-parallel sizes at stage 0", str(paths[0]))
    size = max(sizes, default=ep_ranks[-1] + 1)
    step = module.num_parts if files.elsewhere else 1
    expected = list(range(ep_ranks[0] % step, size, step))
    if ep_ranks != expected:
        what = f"the optimizers of expert-parallel ranks {ep_ranks} are here, not of {size if step == 1 else expected}"
        raise damaged(what, str(files.folder))
    dense = {name: tensor for name, tensor in module.parameters().items() if name not in module.experts}
    where = [str(path) for path in paths]
    if own_names is None:
        return read_unnamed_experts(states, dense, module.experts, names, where), states[0]
    tensors = rank_tensors(layers, module.experts)
    if len(tensors) != len(states):
        raise damaged(f"the optimizers of {len(states)} ranks are here, of {len(tensors)}", str(files.folder))
    parts = []
    for state, of_rank, path in zip(states, tensors, where, strict=True):
        part = read_replaced(state, dense, of_rank, names, path, layers, own_names)
        split_into_experts(part, layers, module.file)
        parts.append(part)
    return merged(parts), states[0]


def _frozen(
    files: CheckpointFiles, model: dict[str, Any], size: int, notes: list[str], turns: Turns
) -> FlatState | None:
    """Stage 3: the parameters that no optimizer has, each rank's part from its model file."""
    if len(files.model) < size:
        raise damaged(
            f"there are model files of {len(files.model)} ranks, not of {size}: the next would be"
            f" {files.model[0].name.replace('rank_0_', f'rank_{len(files.model)}_', 1)}",
            str(files.folder),
        )
    if len(files.model) > size:
        notes.append(f"{len(files.model) - size} model files of ranks beyond {size - 1} were left out.")
    shapes = model.get("frozen_param_shapes")
    if not shapes:
        return None
    paths = [str(path) for path in files.model[:size]]
    states = [model, *(open_file(path, verify=turns.take()) for path in files.model[1:size])]
    parts = FlatState([], paths)
    for state, path in zip(states, paths, strict=True):
        fragments = entry(state, "frozen_param_fragments", path)
        parts.flats.append([{MODEL: entry(fragments, name, path).detach()} for name in shapes])
    for index, (name, shape) in enumerate(shapes.items()):
        parts.add(name, shape, 0, EqualParts(index, 0, math.prod(shape), range(size)), {})
    return parts
