"""``Part``: what joins the steps of an engine. A technique, or a script, overrides the methods that it needs.

    initialize()                        prepare(engine)
    engine(batch)                       before_forward(args, kwargs)    after_forward(output)    explain(error)
    engine.backward(loss), scale(loss)  before_backward(loss)
    engine.step(), at a boundary        at_reduction(status)            before_step()
                                        at_step(was_applied)            after_step()
    save_checkpoint(), load_checkpoint  state()                         load_state(saved)
    memory_report()                     saved_nbytes()
    destroy()                           before_destroy()                after_destroy()

Methods that a part does not override are not called. Parts are called in their order, at the end in the opposite one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from shoal.errors import UsageError
from shoal.sharding.placement import Tier

ForwardInputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class Part:
    """Joins the steps of one engine; does nothing by itself.

    Every rank has the same parts, so a method may communicate. What a method raises, the engine's method raises: in a
    forward pass and in a step the gradients of the step are discarded then.
    """

    @property
    def name(self) -> str:
        """The key of its state in a checkpoint."""
        return type(self).__name__

    def prepare(self, engine: Any) -> None:
        """The engine is complete; nothing has run yet.

        Args:
            engine: a ``shoal.Engine``.
        """

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardInputs | None:
        """Before a forward pass, in training and in evaluation, and inside ``torch.func`` transforms.

        Args:
            args, kwargs: as the model will get them. Of pipeline stages: (stage, what it received, the micro-batch).

        Returns: what it gets instead; None: the same.
        """

    def after_forward(self, output: Any) -> None:
        """After a forward pass that raised nothing, except inside ``torch.func`` transforms."""

    def explain(self, error: Exception) -> None:
        """A forward pass, or ``before_forward``, raised ``error``: add a note to it, or raise a better one from it."""

    def before_backward(self, loss: torch.Tensor) -> None:
        """Before ``engine.backward(loss)`` and ``engine.scale(loss)``; of pipeline stages where the loss is computed.

        Args:
            loss: one number with a graph, not scaled yet.
        """

    def at_reduction(self, status: Any) -> Any:
        """The gradients of a step are summed over the ranks; also in ``clip_grad_norm_()`` before the step.

        Args:
            status: a ``GlobalStatus`` of them.

        Returns: the status of the gradients as they are now. Every rank returns the same.
        """
        return status

    def before_step(self) -> bool | None:
        """The gradients of a step are reduced, and its mean loss is known; clipping and the optimizer follow.

        Returns: False: the step is skipped, and its gradients are discarded. Every rank returns the same.
        """

    def at_step(self, was_applied: bool) -> None:
        """After the optimizer, before the functions of ``engine.on_step``; ``global_steps`` counts the step.

        Args:
            was_applied: False: the step was skipped, since a loss or a gradient was not finite, or ``before_step`` of
                a part has said so.
        """

    def after_step(self) -> None:
        """At the end of ``engine.step()``: all counters are those of the next step, and the step is logged."""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint saves, the same on all ranks: numbers, text, lists, dicts and tensors."""
        return {}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """A checkpoint was loaded whose run had a part of this name. Parameters and counters are loaded already."""

    def saved_nbytes(self) -> Mapping[Tier, int]:
        """Bytes of activations that it keeps for backward now, by tier."""
        return {}

    def before_destroy(self) -> None:
        """The engine is destroyed; its parameters are still sharded."""

    def after_destroy(self) -> None:
        """The engine was destroyed, or failed while it was: the model has no hooks of it any more."""


class PartCalls:
    """Of each method the parts that override it, bound once."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.before_forward: _Calls = _overriding(parts, Part.before_forward)
        self.after_forward: _Calls = _overriding(parts, Part.after_forward)
        self.explain: _Calls = _overriding(parts, Part.explain)
        self.before_backward: _Calls = _overriding(parts, Part.before_backward)
        self.at_reduction: _Calls = _overriding(parts, Part.at_reduction)
        self.before_step: _Calls = _overriding(parts, Part.before_step)
        self.at_step: _Calls = _overriding(parts, Part.at_step)
        self.after_step: _Calls = _overriding(parts, Part.after_step)
        self.saved_nbytes: _Calls = _overriding(parts, Part.saved_nbytes)
        self.before_destroy: _Calls = _overriding(parts, Part.before_destroy)
        self.after_destroy: _Calls = _overriding(parts, Part.after_destroy)


_Calls: TypeAlias = tuple[Callable[..., Any], ...]


def _overriding(parts: Sequence[Part], method: Callable[..., Any]) -> _Calls:
    bound = [getattr(part, method.__name__) for part in parts]
    return tuple(each for each in bound if getattr(each, "__func__", None) is not method)


def check_parts(parts: Sequence[Any]) -> None:
    """Raises: UsageError: one of them is no part, or two that save a state have one name."""
    for part in parts:
        if not isinstance(part, Part):
            raise UsageError(
                f"parts has {part!r}, which is no object of a class derived from shoal.Part.",
                do="write class MyPart(shoal.Part), and pass parts=[MyPart()].",
                code="part-type",
            )
    names = [part.name for part in parts if _overriding([part], Part.state)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"two parts with a state have the name {twice[0]!r}, under which a checkpoint saves it.",
            do="give each a name of its own: a property, or an attribute of the class.",
            code="part-name",
        )


def stateful(parts: Sequence[Part]) -> dict[str, Part]:
    """The parts that save a state, by name."""
    return {part.name: part for part in parts if _overriding([part], Part.state)}
