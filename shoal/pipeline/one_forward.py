"""One forward of one pipeline stage of a model that was cut: which blocks run, and what crosses to the next stage.

The model's own forward runs. Its list of blocks is replaced for that time by a ``RunningBlocks``, which gives in place
of a block

    before this stage     one that computes nothing and returns a guard
    of this stage         the block; the first one gets what was received in place of the model's arguments
    after this stage      one that ends the forward: its arguments are what the next stage receives
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.errors import ModelError
from shoal.parallel.recompute import checkpoint
from shoal.pipeline.blocks import ModelBlocks, Side, cut_error, is_cache
from shoal.pipeline.left_behind import Learnt, LeftTensors, kept, put, roots
from shoal.pipeline.stand_in import Delegate, guard, guard_error, guarded_by, line_of_model


class EndOfStage(Exception):  # no error: ends the model's forward after the last block of a stage
    """Carries what the next stage receives."""

    def __init__(self, message: dict[str, Any]) -> None:
        super().__init__(message)
        self.message = message


class OneForward:
    """The state of one forward of one stage.

    Args:
        modules: of the blocks; those that are elsewhere on the meta device.
        begin, end: the blocks of this stage.
        interval: recompute so many blocks of the stage at a time in backward; 0: none.
        received: what the stage before returned: ``{"arguments": tensors by position or name of the first block's
            argument, "output": the form of what a block returns, "left": what the blocks before left behind}``.
        learnt: of earlier forwards of the stage.
    """

    def __init__(
        self,
        blocks: ModelBlocks,
        modules: list[nn.Module],
        begin: int,
        end: int,
        received: Any,
        device: torch.device,
        interval: int,
        learnt: Learnt,
    ) -> None:
        self.blocks = blocks
        self.modules = modules
        self.begin = begin
        self.end = end
        self.device = device
        self.interval = interval if torch.is_grad_enabled() else 0
        self.run: RecomputedRun | None = None
        self.has_begun = begin == 0 and end == len(blocks.names)
        self.is_over = False
        self._is_last = end == len(blocks.names)
        self.form: Any = received["output"] if received else None
        self._received: dict[str, torch.Tensor] = received["arguments"] if received else {}
        self._is_found = False  # the list of blocks was asked for a block of this stage
        self._position = -1  # of the last block that was called
        self._guards: dict[int, weakref.ref[torch.Tensor]] = {}  # by id
        self._produced: dict[int, weakref.ref[torch.Tensor]] = {}  # by id; the next stage cannot compute them
        self._replaced: list[tuple[torch.Tensor, torch.Tensor]] = []  # the model's argument, what was received for it
        self._learnt = learnt
        self._searches_modules = learnt.begin_forward()
        self._left_before: list[Any] = received["left"] if received else []  # paths and values
        self._left: list[LeftTensors] = []
        self._new: list[LeftTensors] = []  # the blocks of this stage left it behind, for the loss or not
        self._returned: dict[str, Callable[[], torch.Tensor | None]] = {}  # the first tensor of each module's output
        self._further: list[LeftTensors] = []  # further tensors of the last block's output

    def finish(self) -> None:
        self.is_over = True
        if not self._is_last:
            for place in self._left:
                place.take_out()
        self._left.clear()
        self._new.clear()
        self._produced.clear()
        self._guards.clear()

    def guard(self, like: torch.Tensor, of: str) -> torch.Tensor:
        made = guard(like, self.device, of)
        if not self.is_over:
            self._guards[id(made)] = weakref.ref(made)
        return made

    def record(self, output: Any) -> None:
        """What a module or block of this stage returned: the next stage cannot compute it."""
        if not self.is_over:
            for leaf in _tensors(output):
                self._produced[id(leaf)] = weakref.ref(leaf)

    def block(self, position: int) -> Any:
        """What the model gets in place of a block."""
        if position < self.begin:
            return SkippedBlock(self, position)
        self._is_found |= position < self.end
        return OwnBlock(self, position) if position < self.end else EndBlock(self, position)

    def skip(self, position: int, args: Any, kwargs: Any) -> Any:
        """What a block before this stage returns; it leaves behind what it did on its own stage."""
        self._enter(position)
        if self.has_begun and not self.is_over:
            raise self._order_error(position)
        name = self.blocks.name(position)
        outputs = self._receive(name, self.modules[position], args, kwargs)
        if "hidden" not in outputs:
            # Another one each time: the model may keep the outputs of several blocks apart.
            first = next(iter(self._received.values()))
            outputs["hidden"] = self.guard(first, f"the output of {name!r}{line_of_model()}")
        output = _map(lambda key, leaf: outputs.get(key if leaf is None else leaf), self.form, "")
        return SkippedOutput(output) if isinstance(output, dict) else output

    def _receive(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
        """Leave behind what a module did on its own stage. Returns: those of its outputs that are sent, by key."""
        outputs = {}
        for path, value in self._left_before:
            if path[0] == name and path[1] == "output":
                outputs[path[2]] = value if torch.is_grad_enabled() else value.detach()
            if path[0] == name and not self.is_over:
                self._left.append(put(roots(module, args, kwargs), tuple(path), value))
        return outputs

    def arguments(self, position: int, args: Any, kwargs: Any, is_first: bool) -> tuple[Any, Any]:
        """The arguments of a block of this stage: those received in place of the model's own."""
        self._enter(position)
        self._pass_on(args, kwargs)
        if not (is_first or self._guards or self._replaced):
            return args, kwargs
        missing = set(self._received) if is_first else set()

        def replace(key: str, leaf: Any) -> Any:
            if is_first and key in self._received:
                missing.remove(key)
                if isinstance(leaf, torch.Tensor):
                    self._replaced.append((leaf, self._received[key]))
                return self._received[key]
            if not isinstance(leaf, torch.Tensor) or self.is_over:
                return leaf
            for local, received in self._replaced:
                if leaf is local:
                    return received
            self._check(leaf, key, position)
            return leaf

        replaced: tuple[Any, Any] = _map_arguments(replace, args, kwargs)
        if missing:
            raise cut_error(
                f"block {self.blocks.name(position)!r} has no argument {sorted(missing)[0]!r}, but the stage before "
                "sends one.",
                "pass all blocks the same arguments in the same way.",
            )
        return replaced

    def call(self, begin: int, end: int, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """``run`` some blocks of this stage; record what they return and leave behind."""
        modules = {self.blocks.name(at): self.modules[at] for at in range(begin, end)}
        return self.leave(end - 1, self._run(modules, args, kwargs, run))

    def call_outside(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module of the first stage; record what it returns and leaves behind."""
        output = self._run({name: module}, args, kwargs, module)
        self.record(output)
        tensors = _tensors(output)
        if tensors and not self.is_over:
            # Of several calls, the last one's output would not be told from the others'.
            self._returned[name] = weakref.ref(tensors[0]) if name not in self._returned else lambda: None
        return output

    def _run(self, modules: dict[str, nn.Module], args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        if self._is_last or self.is_over:
            return run(*args, **kwargs)
        of = {n: roots(module if self._searches_modules else None, args, kwargs) for n, module in modules.items()}
        before = kept(of)
        output = run(*args, **kwargs)
        after = kept(of).items()
        self._new += [place for path, place in after if path not in before or before[path].stamp != place.stamp]
        return output

    def leave(self, position: int, output: Any) -> Any:
        """Record what a block of this stage returned.

        Returns: it. Where there is no graph, what was received is not returned itself: reentrant recomputation would
        give it a ``grad_fn``, that of the block whose input it is.
        """
        if not torch.is_grad_enabled():
            received = {id(tensor) for tensor in self._received.values()}
            output = _map(lambda _, leaf: leaf.detach() if id(leaf) in received else leaf, output, "")
        if not self.is_over:
            self.record(output)
            tensors = _tensors(output)
            self.form = _map(lambda _, leaf: "hidden" if leaf is tensors[0] else None, _plain(output), "")
            self._returned[self.blocks.name(position)] = weakref.ref(tensors[0])
            self._further = [
                LeftTensors((self.blocks.name(position), "output", key), None, leaf)
                for key, leaf in _items(_plain(output))
                if isinstance(leaf, torch.Tensor) and leaf is not tensors[0]
            ]
        return output

    def _pass_on(self, args: Any, kwargs: Any) -> None:
        """A further output of the block before that is no argument of the next one is the model's: it is sent."""
        passed = {id(leaf) for _, leaf in _leaves(args, kwargs)}
        self._left += [place for place in self._further if id(place.value) not in passed]
        self._further = []

    def message(self, position: int, args: Any, kwargs: Any) -> dict[str, Any]:
        """What crosses to the next stage, from the arguments of its first block.

        The first tensor; and each that has a gradient or was computed by blocks, so that the next stage cannot compute
        it again.
        """
        if not self._is_found:
            raise self._order_error(position)
        args, kwargs = self.arguments(position, args, kwargs, is_first=not self.has_begun)
        self._left += self._learnt.left(self._new)
        outputs = {at: tensor for at, known in self._returned.items() if (tensor := known()) is not None}
        collected = self._learnt.collected(outputs, [t for p in self._left for t in p.tensors])
        self._left += [LeftTensors((at, "output", "hidden"), None, tensor) for at, tensor in collected]
        behind = [place for place in self._left if place.is_there()]
        crossing: dict[str, torch.Tensor] = {}

        def visit(key: str, leaf: Any) -> None:
            is_received = any(leaf is tensor for tensor in self._received.values())
            in_list = "." in key and any(leaf is place.value for place in behind)
            if (
                isinstance(leaf, torch.Tensor)
                and not in_list
                and (not crossing or leaf.requires_grad or is_received or self._is_produced(leaf))
            ):
                crossing[key] = leaf

        _map_arguments(visit, args, kwargs)
        if not crossing:
            raise cut_error(
                f"block {self.blocks.name(position)!r} is called without a tensor, so there is nothing to send to it.",
                "pass it the hidden states as its first argument, or write a PipelineModule.",
            )
        form = self.form if self.has_begun or self.begin else "hidden"
        return {"arguments": crossing, "output": form, "left": [[list(place.path), place.value] for place in behind]}

    def check_outside(self, name: str, side: Side) -> None:
        """Raises: ModelError: the model calls a module of the first or last stage here, where it should not."""
        if side == "last":
            raise _outside_error(name, "last", "before the last block", "first")
        if self.has_begun and not self.is_over:
            raise _outside_error(name, "first", "after a block of a later one", "last")

    def receive_outside(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> torch.Tensor | None:
        """What the model gets from a module of the first stage, if that is sent."""
        return self._receive(name, module, args, kwargs).get("hidden")

    def _check(self, leaf: torch.Tensor, key: str, position: int) -> None:
        """An argument that was computed from a guard is an error."""
        if self._is_produced(leaf):
            return
        is_guard = id(leaf) in self._guards and self._guards[id(leaf)]() is leaf
        of = guarded_by(leaf) if leaf.requires_grad else ("a module or block" if is_guard else None)
        if of is not None:
            name = f"{self.blocks.name(position)!r}{line_of_model()}"
            raise guard_error(of, f"argument {key!r}, of shape {list(leaf.shape)}, of {name} is computed from it")

    def _is_produced(self, tensor: torch.Tensor) -> bool:
        known = self._produced.get(id(tensor))
        return known is not None and known() is tensor

    def _enter(self, position: int) -> None:
        if self.is_over:  # recomputation
            return
        if position < self._position:
            raise self._order_error(position)
        self._position = position

    def _order_error(self, position: int) -> ModelError:
        first = self.blocks.name(self.begin)
        return cut_error(
            f"the model calls block {self.blocks.name(position)!r} out of order on the stage that begins with "
            f"{first!r}.",
            "cut a list whose blocks the model calls once each, from the first to the last, by naming its blocks in "
            "pipeline.split_points; or write a PipelineModule.",
        )


class SkippedOutput(dict[Any, Any]):
    """A dict that is read as Transformers' outputs are, too: by position or attribute."""

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


class SkippedBlock(Delegate):
    """A block of a stage before this one."""

    def __init__(self, forward: OneForward, position: int) -> None:
        super().__init__(forward.modules[position])
        self._forward = forward
        self._at = position

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward.skip(self._at, args, kwargs)


class OwnBlock(SkippedBlock):
    """A block of this stage."""

    _is_first: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first is None:  # kept for a recomputation
            self._is_first = not self._forward.has_begun
        args, kwargs = self._forward.arguments(self._at, args, kwargs, self._is_first)
        forward = self._forward
        forward.has_begun = True
        if not forward.interval:
            return forward.call(self._at, self._at + 1, args, kwargs, self._module)
        if (self._at - forward.begin) % forward.interval == 0:
            end = min(self._at + forward.interval, forward.end)
            forward.run = RecomputedRun(forward, self._at, end, args, kwargs)
        assert forward.run is not None
        return forward.run.output_of(self._at, args, kwargs)


class RecomputedRun:
    """Consecutive blocks of a stage that are one recomputation: they run when the model calls the first of them.

    The model gets a guard from each of them but the last. So between them it may only pass on the hidden state, and
    must give all of them the same other arguments, which is checked.

    Raises: ModelError: it does not.
    """

    def __init__(self, forward: OneForward, begin: int, end: int, args: Any, kwargs: Any) -> None:
        self._forward, self._begin, self._last = forward, begin, end - 1
        self._given: dict[str, Any] = dict(_leaves(args, kwargs))
        self._hidden_key = next(key for key, leaf in self._given.items() if isinstance(leaf, torch.Tensor))
        modules, hidden_key = forward.modules[begin:end], self._hidden_key

        def run(*args: Any, **kwargs: Any) -> Any:
            output = modules[0](*args, **kwargs)
            for module in modules[1:]:
                hidden = _tensors(output)[0]
                own_args, own_kwargs = _map_arguments(partial(_chosen, hidden_key, hidden), args, kwargs)
                output = module(*own_args, **own_kwargs)
            return output

        args, kwargs = _map_arguments(lambda _, leaf: None if is_cache(leaf) else leaf, args, kwargs)
        self._output = forward.call(begin, end, args, kwargs, partial(checkpoint, run))
        given = {id(leaf) for leaf in self._given.values()}
        of = f"an output of {forward.blocks.name(begin)!r}, which is recomputed together with the next block"
        of += " (pipeline.activation_checkpoint_interval; 1 recomputes each by itself)"
        self._inner = _map(
            lambda _, x: guard(x, x.device, of) if isinstance(x, torch.Tensor) and id(x) not in given else x,
            self._output,
            "",
        )
        self._hidden = _tensors(self._inner)[0]
        forward.record(self._inner)

    def output_of(self, position: int, args: Any, kwargs: Any) -> Any:
        """What the model gets from a block of the run."""
        given = dict(_leaves(args, kwargs))
        other = next(
            (key for key in given.keys() | self._given.keys() if not self._is_same(key, given, position)), None
        )
        if other is not None:
            forward = self._forward
            raise ModelError(
                f"block {forward.blocks.name(position)!r} cannot be recomputed together with"
                f" {forward.blocks.name(self._begin)!r}: its argument {other!r} is a different one.",
                do="write 1, which recomputes each block by itself, or write the layers as a PipelineModule.",
                where="pipeline.activation_checkpoint_interval",
                code="pipeline-recompute",
            )
        if position < self._last:
            return self._inner
        output = self._output
        self._forward.run = self._output = self._inner = None
        return output

    def _is_same(self, key: str, given: dict[str, Any], position: int) -> bool:
        if key not in given or key not in self._given:
            return False
        if position == self._begin:
            return True
        if key == self._hidden_key:
            return given[key] is self._hidden
        first = self._given[key]
        is_plain = isinstance(first, bool | int | float | str | torch.dtype)
        return given[key] is first or (is_plain and type(given[key]) is type(first) and given[key] == first)


class EndBlock(SkippedBlock):
    """A block of a stage after this one: ends the forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise EndOfStage(self._forward.message(self._at, args, kwargs))


class RecordedModule(Delegate):
    """A module before the blocks, on its own stage."""

    def __init__(self, module: nn.Module, name: str, forward: OneForward) -> None:
        super().__init__(module)
        self._name, self._forward = name, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward.call_outside(self._name, self._module, args, kwargs)


class RunningBlocks:
    """A list of blocks while one stage runs. Mixed into the list's own class, so that its own methods work.

    It has as many blocks as the whole model; ``_modules`` are those of this rank.
    """

    _forward: OneForward

    def __len__(self) -> int:
        return len(self._forward.blocks.names)

    def __iter__(self) -> Iterator[Any]:
        return (self._forward.block(position) for position in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        positions = range(len(self))[index]
        if isinstance(positions, int):
            return self._forward.block(positions)
        return [self._forward.block(position) for position in positions]


def _chosen(key: str, value: Any, at: str, leaf: Any) -> Any:
    """``value`` in the place ``key``, else the leaf."""
    return value if at == key else leaf


def _leaves(args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    _map_arguments(lambda key, leaf: leaves.append((key, leaf)), args, kwargs)
    return leaves


def _items(output: Any) -> list[tuple[str, Any]]:
    """The members of an output, by the keys that ``_map`` gives them."""
    if isinstance(output, dict):
        return [(f".{key}", value) for key, value in output.items()]
    return [(f".{at}", value) for at, value in enumerate(output)] if isinstance(output, tuple | list) else []


def _map_arguments(visit: Callable[[str, Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tuple(_map(visit, value, str(index)) for index, value in enumerate(args)), {
        name: _map(visit, value, name) for name, value in kwargs.items()
    }


def _map(visit: Callable[[str, Any], Any], value: Any, key: str) -> Any:
    """``visit(key, leaf)`` of all that is no tuple, list or dict, in a like value; the same one if nothing changes."""
    if type(value) in (tuple, list):
        parts = [_map(visit, part, f"{key}.{index}") for index, part in enumerate(value)]
        is_same = all(part is old for part, old in zip(parts, value, strict=True))
        return value if is_same else type(value)(parts)  # a block may extend a list among its arguments
    if type(value) is dict:
        mapped = {name: _map(visit, part, f"{key}.{name}") for name, part in value.items()}
        return value if all(mapped[name] is part for name, part in value.items()) else mapped
    return visit(key, value)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value  # a ModelOutput is a dict


def _tensors(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    _map(lambda _, leaf: tensors.append(leaf) if isinstance(leaf, torch.Tensor) else None, _plain(value), "")
    return tensors


def _outside_error(name: str, side: Side, when: str, other: Side) -> ModelError:
    return ModelError(
        f"module {name!r} is on the {side} pipeline stage, but the model calls it {when}.",
        where="pipeline",
        do=f"add {name!r} to pipeline.{other}_stage; to pipeline.{side}_stage, too, if the model calls it before and "
        "after its blocks; or to pipeline.every_stage.",
        code="pipeline-beside",
    )
