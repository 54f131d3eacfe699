"""Joins the stages of a pipeline that DeepSpeed saved: one model, one optimizer.

    layer_03-model_00-model_states.pt               layer 3 of tensor-parallel rank 0: tensors under the layer's names
    mp_rank_05_model_states.pt                      counters and names of stage 5 // tp, tensor-parallel rank 5 % tp
    zero_pp_rank_R_mp_rank_05_optim_states.pt       its optimizer's state

    tensor of a layer file       name in the model, as in Shoal's PipelineModule
    up.weight of layer 3         3.up.weight
    weight of a TiedLayerSpec    tied_modules.KEY.weight; no file says KEY for certain

Which names there are is known from what the optimizer's files list, or else from the names that the caller gives. A
tensor of a tied layer that several stages have is read from the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

import torch

from shoal.compat.checkpoints.files import CheckpointFiles, Turns, open_file
from shoal.compat.checkpoints.model_file import ModelFile
from shoal.compat.checkpoints.state import FlatState, NamedState, damaged, merged
from shoal.compat.checkpoints.unnamed import read_unnamed
from shoal.errors import CheckpointError

TIED = "tied_modules."
Names = Sequence[Sequence[str]]
ReadState = Callable[[CheckpointFiles, ModelFile, int, Names | None, Turns], tuple[NamedState | None, Any]]
_LISTS = ("param_shapes", "frozen_param_shapes")


def read_stages(
    files: CheckpointFiles, names: Names | None, turns: Turns, read_state: ReadState
) -> tuple[ModelFile, NamedState | None, Any, int]:
    """The whole model of one tensor-parallel rank, the optimizer's state, its loss scale, the number of ranks.

    Args:
        names: of each group, its parameters in the whole model, where the caller knows them.
        read_state: reads the state of one stage.

    Raises: CheckpointError: files are missing, or it cannot be known which tensor a part of the state belongs to.
    """
    states = [open_file(stage.model[0], verify=turns.take()) for stage in files.stages]
    layers = {index: open_file(path, verify=turns.take()) for index, path in files.layers.items()}
    folder = str(files.folder)
    size = int(states[0].get("dp_world_size") or max(1, len(files.stages[0].optimizer)))
    for stage, state in zip(files.stages, states, strict=True):
        if state.get("param_shapes") is None and stage.optimizer:
            _describe(stage, state, size, turns)
    known = list(dict.fromkeys(name for state in states for name in _names_in(state)))
    of_layer = _named(layers, [*known, *(name for group in names or () for name in group)], folder)
    whole = {name: layers[index][key] for index, named in of_layer.items() for key, name in named.items()}
    for group in (group for state in states for group in state.get("param_shapes") or ()):
        group.update({name: tuple(whole[name].shape) for name in group if group[name] is None and name in whole})
        known = [name for name in known if not (name.startswith(TIED) and group.get(name))]  # may have no file
    _check_all_there(known, whole, layers, folder)
    of_all = {**states[0], "module": whole, "checkpoint_parallel_dimensions": _tensor_parallel(states[0], files)}
    of_all["buffer_names"] = [name for state in states for name in state.get("buffer_names") or ()]
    of_all["shared_params"] = {
        name: first for state in states for name, first in (state.get("shared_params") or {}).items()
    }
    module = ModelFile(of_all, str(files.stages[0].model[0]), is_stage_3=False)
    if states[0].get("optimizer") is not None and not files.stages[0].optimizer:
        trained = _unnamed(states, module, of_layer, names, files)
        return module, trained, states[0]["optimizer"], size * len(states)
    parts, scales = [], []
    for stage, state in zip(files.stages, states, strict=True):
        of_stage = {**of_all, **{key: state.get(key) for key in (*_LISTS, "optimizer")}}
        stage_module = ModelFile(of_stage, str(stage.model[0]), is_stage_3=False, aliases={})
        part, scale = read_state(stage, stage_module, size, names, turns)
        module.notes += [note for note in stage_module.notes if note not in module.notes]
        scales.append(scale)
        if part is not None:
            parts.append(part)
    return module, merged(parts) if parts else None, scales[0], size * len(states)


def _tensor_parallel(state: Mapping[str, Any], files: CheckpointFiles) -> dict[str, int]:
    """Raises: CheckpointError: files of stages are missing."""
    dimensions = state.get("checkpoint_parallel_dimensions") or {}
    num_stages = int(dimensions.get("pp_degree") or len(files.stages))
    if num_stages != len(files.stages):
        what = f"{num_stages} pipeline stages saved it, and model files of {len(files.stages)} are here"
        raise damaged(what, str(files.folder))
    return {"tp_degree": int(dimensions.get("tp_degree") or int(state.get("mp_world_size") or 1) // num_stages or 1)}


def _describe(stage: CheckpointFiles, state: dict[str, Any], size: int, turns: Turns) -> None:
    """In 16 bits at stage 0 there are optimizer files as at stage 1, and the names are in them alone."""
    state["optimizer"] = None
    groups: list[dict[str, Any]] = []
    for path in stage.optimizer_of(size)[0]:
        opened = open_file(path, verify=turns.take())["optimizer_state_dict"]
        for index, members in enumerate(opened.get("param_slice_mappings") or ()):
            groups += [{}] if index == len(groups) else []
            groups[index] |= dict.fromkeys(members)
    state["param_shapes"] = groups  # the shapes are in the files of the layers


def _names_in(state: Mapping[str, Any]) -> Iterator[str]:
    """The names of parameters and buffers that a stage's model file lists."""
    shapes = state.get("param_shapes") or ()
    yield from chain.from_iterable(shapes)
    yield from state.get("frozen_param_shapes") or ()
    yield from state.get("buffer_names") or ()


def _named(layers: Mapping[int, Mapping[str, Any]], known: Sequence[str], folder: str) -> dict[int, dict[str, str]]:
    """Of each layer, the names in the model by the names in the layer.

    Raises: CheckpointError: a layer can be one of several tied ones.
    """
    tied: dict[str, set[str]] = {}
    for name in known:
        if name.startswith(TIED) and name.count(".") > 1:
            _, key, rest = name.split(".", 2)
            tied.setdefault(key, set()).add(rest)
    listed, names = set(known), {}
    for index, layer in sorted(layers.items()):
        tensors = {key for key, value in layer.items() if isinstance(value, torch.Tensor)}
        prefix = f"{index}."
        if tensors and not any(prefix + key in listed for key in tensors):
            keys = [key for key, members in tied.items() if members == tensors & members and members]
            if len(keys) > 1:
                raise CheckpointError(
                    f"layer {index} can be any of the tied layers {', '.join(keys)}: their tensors have one name.",
                    where=folder,
                    do="in DeepSpeed, give the tied layers parameters with different names, and save it again.",
                    code="checkpoint-unnamed",
                )
            prefix = f"{TIED}{keys[0]}." if keys else prefix
        names[index] = {key: prefix + key for key in sorted(tensors, key=list(layer).index)}
    return names


def _check_all_there(known: Sequence[str], whole: Mapping[str, Any], layers: Mapping[int, Any], folder: str) -> None:
    """Raises: CheckpointError: the file of a layer is missing."""
    missing = [name for name in known if name not in whole]
    if missing:
        absent = sorted({name.split(".")[0] for name in missing if name.split(".")[0] not in map(str, layers)})
        what = f"the files of layers {', '.join(absent)} are missing" if absent else f"{missing[0]} is in no file"
        raise damaged(what, folder)


def _unnamed(
    states: Sequence[Mapping[str, Any]],
    module: ModelFile,
    of_layer: Mapping[int, Mapping[str, str]],
    names: Names | None,
    files: CheckpointFiles,
) -> NamedState | None:
    """Stage 0: no file says which layers a stage had; the tensors of its optimizer do."""
    if names is not None and not names:
        module.notes.append("The optimizer's state was left out, as requested.")
        return None
    parameters = module.parameters()
    layers = [[name for name in named.values() if name in parameters] for _, named in sorted(of_layer.items())]
    tied: dict[str, list[str]] = {}
    for name in parameters:
        if name.startswith(TIED):
            tied.setdefault(name.split(".")[1], []).append(name)
    search = _StageSearch(states, [str(stage.model[0]) for stage in files.stages], parameters, layers, tied, names)
    return merged(search.find())


class _StageSearch:
    """Finds the consecutive layers of each stage whose parameters fit the stage's optimizer.

    A stage's parameters are those of its tied layers, then those of the others. A tied layer that a stage calls through
    a function has no file there, so every subset of the tied layers is tried.
    """

    def __init__(
        self,
        states: Sequence[Mapping[str, Any]],
        files: Sequence[str],
        parameters: Mapping[str, torch.Tensor],
        layers: Sequence[Sequence[str]],
        tied: Mapping[str, Sequence[str]],
        names: Names | None,
    ) -> None:
        self._states, self._files, self._parameters = states, files, parameters
        self._layers, self._tied, self._names = layers, tied, names
        self._trained = None if names is None else {name for group in names for name in group}
        self._found: dict[tuple[int, int], list[list[FlatState]]] = {}
        self._problem: CheckpointError | None = None

    def find(self) -> list[FlatState]:
        """Raises: CheckpointError: no layers fit, or there are several ways."""
        ways = self._from(0, 0)
        if len(ways) == 1:
            return ways[0]
        if not ways and self._problem is not None and len(self._states) == 1:
            raise self._problem
        raise CheckpointError(
            "at stage 0 DeepSpeed saves the optimizer's state without names, and"
            f" {'several' if ways else 'no'} ways to give the pipeline stages their layers fit it.",
            where=self._files[0],
            do="load it into an engine with the same parameter groups, which give the names; or leave the state out:"
            " load_optimizer_states=False.",
            code="checkpoint-unnamed",
        )

    def _from(self, stage: int, start: int) -> list[list[FlatState]]:
        """What fits this stage and those after it, where the stage begins with layer ``start``."""
        if stage == len(self._states):
            return [[]] if start == len(self._layers) else []
        if (stage, start) not in self._found:
            result: dict[str, list[FlatState]] = {}
            ends = range(start, len(self._layers) + 1) if stage < len(self._states) - 1 else [len(self._layers)]
            for end in ends:
                for state in self._fitting(stage, start, end):
                    for rest in self._from(stage + 1, end):
                        states = [state, *rest]
                        result.setdefault(repr([sorted(each.group_of.items()) for each in states]), states)
            self._found[stage, start] = list(result.values())
        return self._found[stage, start]

    def _fitting(self, stage: int, start: int, end: int) -> Iterable[FlatState]:
        in_layers = [name for layer in self._layers[start:end] for name in layer]
        here = [key for key, members in self._tied.items() if set(members) & set(in_layers)]
        others = [key for key in self._tied if key not in here]
        for more in chain.from_iterable(combinations(others, count) for count in range(len(others) + 1)):
            keys = [key for key in self._tied if key in here or key in more]
            tied = [name for key in keys for name in self._tied[key]]
            members = {name: self._parameters[name] for name in dict.fromkeys([*tied, *in_layers])}
            state = self._fit(stage, members)
            if state is None:
                continue
            untrained = set() if self._trained is None else set(tied) - self._trained
            if set(tied) <= set(state.group_of) | untrained:
                yield state

    def _fit(self, stage: int, parameters: Mapping[str, torch.Tensor]) -> FlatState | None:
        state, file = dict(self._states[stage]["optimizer"]), self._files[stage]
        if "fp32_groups_flat" not in state:
            groups = state.get("optimizer_state_dict", state).get("param_groups", ())
            number, most = sum(len(group["params"]) for group in groups), len(parameters)
            if self._trained is not None:
                most = sum(name in self._trained for name in parameters)
            if number > most or (self._trained is not None and number < most):
                return None
        elif sum(flat.numel() for flat in state["fp32_groups_flat"]) > sum(
            tensor.numel() for tensor in parameters.values()
        ):
            return None
        names = None if self._names is None else [[n for n in parameters if n in set(group)] for group in self._names]
        try:
            return read_unnamed(state, parameters, names, file)
        except CheckpointError as error:
            self._problem = error
            return None
