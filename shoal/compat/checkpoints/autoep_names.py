"""The names and layouts that tensors had in the model, before AutoEP replaced its mixtures of experts.

    as AutoEP has them                     as the model does
    mlp.router.gate.weight    [E, D]       mlp.gate.weight
    mlp.experts.w1.3          [I, D]       mlp.experts.gate_up_proj [E, 2 I, D]    or [E, D, 2 I]: row 3, first half
    mlp.experts.w3.3          [I, D]                                               second half
    mlp.experts.w2.3          [D, I]       mlp.experts.down_proj    [E, D, I]      or [E, I, D]: row 3
    mlp.experts.w1.3          [I, D]       mlp.experts.3.gate_proj.weight          where the experts are a list
    mlp.shared_experts.NAME                mlp.shared_expert.NAME

A checkpoint has DeepSpeed's configuration, which names the attributes, or those of a preset. It does not say whether
the experts were a stack or a list, nor which of a stack's layouts they had: the model says it, where there is one, and
otherwise they are taken for the stack of Transformers 5, as DeepSpeed's presets have it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from shoal.checkpoint.foreign import Shapes
from shoal.checkpoint.portable import About, TensorInfo, join
from shoal.checkpoint.rectangles import Rectangle
from shoal.compat.checkpoints.autoep import AutoEpLayer, of_expert, under
from shoal.compat.checkpoints.state import StateTensor, Tensors, damaged
from shoal.errors import CheckpointError

_Value = TypeVar("_Value")
# The presets' shared experts; a model of another preset has none.
_SHARED = {
    "qwen3_moe": "shared_expert",
    "qwen3_5_moe": "shared_expert",
    "deepseek_v2": "shared_experts",
    "deepseek_v3": "shared_experts",
    "minimax_m3": "shared_experts",
}
_SHARED_GATE = "shared_expert_gate"
_STACKED = ("gate_up_proj", "down_proj", None)
_LISTED = ("gate_proj", "down_proj", "up_proj")  # of a list in DeepSeek's own code
_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class MadeTensor:
    """A tensor of the model, made of tensors of single experts.

    Args:
        parts: of each expert, its tensors, which lie one behind the other in the first dim.
        is_transposed: each expert's dims are exchanged afterwards.
        is_listed: there is one expert, and no dim of experts.
    """

    parts: tuple[tuple[str, ...], ...]
    is_transposed: bool = False
    is_listed: bool = False

    @property
    def names(self) -> list[str]:
        return [name for names in self.parts for name in names]

    def info(self, infos: Mapping[str, TensorInfo]) -> TensorInfo:
        rows = sum(infos[name].shape[0] for name in self.parts[0])
        dtype, columns = infos[self.parts[0][0]].dtype, infos[self.parts[0][0]].shape[1]
        shape = (columns, rows) if self.is_transposed else (rows, columns)
        return TensorInfo(dtype, shape if self.is_listed else (len(self.parts), *shape))

    def read(self, info: TensorInfo, tensors: Tensors) -> torch.Tensor:
        """Memory: the tensor, and an expert of it."""

        def slices() -> Iterator[tuple[Rectangle, torch.Tensor]]:
            for expert, names in enumerate(self.parts):
                lead = () if self.is_listed else (expert,)
                at = 0
                for name in names:
                    part = tensors[name].read()
                    start = (0, at) if self.is_transposed else (at, 0)
                    values = part.t() if self.is_transposed else part
                    yield Rectangle((*lead, *start), (*(1 for _ in lead), *values.shape)), values
                    at += len(part)

        return join(info, slices())


class ModelNames:
    """What the model's tensors are called, and made of.

    Args:
        config: of DeepSpeed, as the checkpoint has it.
        tensors: all of the checkpoint's, under AutoEP's names.
        model: the tensors of the model that loads them; None: there is none.

    Raises: CheckpointError: the names are in neither.
    """

    def __init__(
        self,
        layers: Sequence[AutoEpLayer],
        config: Any,
        tensors: Mapping[str, TensorInfo],
        model: Shapes | None,
        file: str,
    ) -> None:
        self.notes: list[str] = []
        self._file = file
        self._made: dict[str, MadeTensor] = {}
        self._own_of: dict[str, str] = {}
        section = config.get("expert_parallel") if isinstance(config, Mapping) else None
        if not isinstance(section, Mapping) and model is None:
            raise _unnamed("its configuration, which names the layers' attributes, is not in it", file)
        for layer in layers:
            self._add(_Attributes(layer, dict(section or {}), tensors, model, file), tensors, model)
        self._renamed = {original: name for name, original in self._own_of.items()}
        self._own_of |= {part: name for name, made in self._made.items() for part in made.names}
        if model is None and self._made:
            self.notes.append(
                f"AutoEP does not say how the experts lay in the model; they were taken for stacks, as in"
                f" Transformers 5: {next(iter(self._made))}, ..."
            )

    def _add(self, names: _Attributes, tensors: Mapping[str, TensorInfo], model: Shapes | None) -> None:
        start = under(names.layer.path)
        for name in tensors:
            if name.startswith(start) and not name.startswith(f"{start}experts."):
                self._own_of[name] = start + names.of_module(name.removeprefix(start))
        gate, down, up = names.weights
        w1, w2, w3 = names.layer.tensors
        made_of = {gate: [w1, w3], down: [w2]} if up is None else {gate: [w1], down: [w2], up: [w3]}
        numbers = range(names.layer.num_experts)
        parts = {
            weight: tuple(tuple(of_expert(each, expert) for each in tensors_of_expert) for expert in numbers)
            for weight, tensors_of_expert in made_of.items()
        }
        place = f"{start}{names.experts}."
        if names.is_listed:
            listed = ((f"{place}{e}.{weight}", each[e]) for weight, each in parts.items() for e in numbers)
            self._made |= {name: MadeTensor((tensors_of_expert,), is_listed=True) for name, tensors_of_expert in listed}
            return
        made = {f"{place}{weight}": MadeTensor(each) for weight, each in parts.items()}
        turned = {name: replace(each, is_transposed=True) for name, each in made.items()}
        self._made |= turned if not _fit(made, tensors, model) and _fit(turned, tensors, model) else made

    def infos(self, infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The model's tensors, of AutoEP's.

        Raises: CheckpointError: those of some experts are missing, or are of another shape than those of others.
        """
        result: dict[str, TensorInfo] = {}
        for name, info in infos.items():
            model_name = self._own_of.get(name, name)
            if model_name in result:
                if model_name not in self._made:
                    raise damaged(f"two tensors are {model_name}", self._file)
                continue
            made = self._made.get(model_name)
            result[model_name] = info if made is None else self._checked(model_name, made, infos)
        return result

    def _checked(self, model_name: str, made: MadeTensor, infos: Mapping[str, TensorInfo]) -> TensorInfo:
        missing = [name for name in made.names if name not in infos]
        if missing:
            raise damaged(
                f"{len(missing)} of the tensors of {model_name} are missing, {missing[0]} for one", self._file
            )
        kinds = {tuple((infos[name].dtype, infos[name].shape) for name in names) for names in made.parts}
        sizes = {shape[1:] for kind in kinds for _, shape in kind}
        if len(kinds) > 1 or len(sizes) > 1 or any(len(shape) != 2 for kind in kinds for _, shape in kind):
            raise damaged(f"{model_name} is made of tensors of several shapes or dtypes", self._file)
        return made.info(infos)

    def tensors(self, tensors: Tensors) -> dict[str, StateTensor]:
        """As ``infos``, of tensors that can be read."""
        infos = self.infos({name: tensor.info for name, tensor in tensors.items()})
        return {
            name: StateTensor(info, partial(self._made[name].read, info, tensors))
            if name in self._made
            else tensors[self._renamed.get(name, name)]
            for name, info in infos.items()
        }

    def parts(self, name: str) -> list[str]:
        """AutoEP's tensors that one of the model's is, or is made of."""
        made = self._made.get(name)
        return [self._renamed.get(name, name)] if made is None else made.names

    def rename(self, about: About) -> None:
        """Give the optimizer's and the parameters' entries the model's names.

        Raises: CheckpointError: parts of a tensor are in different groups, or took another number of steps.
        """
        about.parameters = self.infos(about.parameters)
        about.group_of = self._same("groups", about.group_of)
        about.scalars = self._same("steps", about.scalars)
        about.aliases = {
            self._own_of.get(name, name): tuple(self._own_of.get(other, other) for other in others)
            for name, others in about.aliases.items()
        }
        about.notes.extend(note for note in self.notes if note not in about.notes)

    def _same(self, what: str, values: Mapping[str, _Value]) -> dict[str, _Value]:
        result: dict[str, _Value] = {}
        for name, value in values.items():
            model_name = self._own_of.get(name, name)
            if result.setdefault(model_name, value) != value:
                raise damaged(f"{name} has other {what} than other parts of {model_name}", self._file)
        return result


@dataclass(frozen=True)
class _Attributes:
    """The attributes of one layer, as DeepSpeed found them.

    Args:
        section: ``expert_parallel`` of DeepSpeed's configuration.
    """

    layer: AutoEpLayer
    section: dict[str, Any]
    tensors: Collection[str]
    model: Shapes | None
    file: str

    @property
    def router(self) -> str:
        return self._given("router_pattern") or "gate"

    @property
    def experts(self) -> str:
        return self._given("expert_pattern") or "experts"

    @cached_property
    def here(self) -> frozenset[str]:
        """The model's tensors in this layer, without the layer's path."""
        start = under(self.layer.path)
        return frozenset(name.removeprefix(start) for name in self.model or () if name.startswith(start))

    @cached_property
    def is_listed(self) -> bool:
        if self.model is None and self._given("expert_w3"):
            what = f"the experts of {self.layer.path} have three weights each, which a list may have and a stack"
            raise _unnamed(what, self.file)
        return any(map(re.compile(rf"{re.escape(self.experts)}\.\d+\..+").fullmatch, self.here))

    @property
    def weights(self) -> tuple[str, str, str | None]:
        """What the gate, down and up weights are called in the module of experts, or in each of a list."""
        given = [self._given(key) for key in ("expert_w1", "expert_w2", "expert_w3")]
        gate, down, up = _STACKED
        if self.is_listed and given == [None] * 3 and self._listed(gate) is None:
            gate, down, up = _LISTED
        gate, down, up = given[0] or gate, given[1] or down, given[2] or up
        if not self.is_listed:
            return gate, down, up
        return (
            self._listed(gate) or f"{gate}.weight",
            self._listed(down) or f"{down}.weight",
            up and (self._listed(up) or f"{up}.weight"),
        )

    def of_module(self, name: str) -> str:
        """The model's name of what is not the experts', without the layer's path."""
        if match := re.fullmatch(r"router\.gate\.(weight|bias)", name):
            return f"{self.router}.{match[1]}"
        if name == f"router.{_BIAS}":
            return self._correction_bias()
        first, _, rest = name.partition(".")
        if first == "shared_experts":
            return f"{self._shared()}.{rest}"
        if first == "shared_experts_gate":
            return f"{self._given('shared_experts_gate_pattern') or _SHARED_GATE}.{rest}"
        raise damaged(f"AutoEP's layers have no tensor like {name!r} of {self.layer.path}", self.file)

    def _shared(self) -> str:
        given = self._given("shared_experts_pattern") or _SHARED.get(str(self.section.get("preset_model")))
        if given is not None:
            return given
        names = {name.partition(".")[0] for name in self.here} & set(_SHARED.values())
        if len(names) == 1:
            return names.pop()
        # Without a name in the configuration it is a preset's, and Qwen's alone have a gate.
        has_gate = any(name.startswith(f"{under(self.layer.path)}shared_experts_gate.") for name in self.tensors)
        return "shared_expert" if has_gate else "shared_experts"

    def _correction_bias(self) -> str:
        """The bias of the choice, which a model has in its router, or next to it."""
        names = [name for name in self.here if name.endswith(_BIAS)]
        return names[0] if len(names) == 1 else f"{self.router}.{_BIAS}"

    def _listed(self, weight: str) -> str | None:
        """A weight's name in the experts of the model's list: a parameter, or a module with one."""
        starts = [f"{self.experts}.{expert}.{weight}" for expert in range(self.layer.num_experts)]
        return next((weight + end for end in ("", ".weight") for start in starts if start + end in self.here), None)

    def _given(self, key: str) -> str | None:
        value = self.section.get(key)
        if value is not None and not isinstance(value, str):
            raise damaged(f"expert_parallel.{key} is {value!r}", self.file)
        return value


def _fit(made: Mapping[str, MadeTensor], tensors: Mapping[str, TensorInfo], model: Shapes | None) -> bool:
    """True if the model's tensors have these shapes."""
    return all(
        all(part in tensors for part in each.parts[0]) and (model or {}).get(name) == each.info(tensors).shape
        for name, each in made.items()
    )


def _unnamed(what: str, file: str) -> CheckpointError:
    return CheckpointError(
        f"AutoEP has replaced the model's mixtures of experts, and {what}.",
        where=file,
        do="load it into an engine with load_checkpoint(), whose model has the names; or pass the model's:"
        " DeepSpeedSource(folder, model={'model.layers.0.mlp.experts.gate_up_proj': (8, 64, 32), ...}).",
        code="checkpoint-unnamed",
    )
