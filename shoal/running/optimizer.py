"""The optimizer that users see: their own groups and hyperparameters, state by parameter, over sharded masters."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.errors import OptimizerError, UsageError
from shoal.optim.loss_scale import LossScale
from shoal.running.foreign_names import refuse_foreign_name
from shoal.running.step import ShardedStep
from shoal.sharding.encoded_state import is_elementwise
from shoal.sharding.param_group import ParameterGroup


class StateByParameter(Mapping[nn.Parameter, dict[str, Any]]):
    """Optimizer state keyed by the model's parameters, read from the parameter ranges.

    The 1-D ranges of main parameters that the optimizer steps are keys too; iterating leaves them out.

    A value that has one element per element of the parameter is given as this rank's part of it: in the parameter's
    shape where this rank owns all of it, else 1-D. Other values (``step``) are given as they are.
    """

    def __init__(self, step: ShardedStep) -> None:
        self._step = step
        self._home: dict[int, tuple[ParameterGroup, int, nn.Parameter]] = {
            id(parameter): (group, slot, parameter)
            for group in step.groups
            for slot, parameter in enumerate(group.parameters)
        }

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        if id(parameter) not in self._home:
            return self._of_range(parameter)
        group, slot, _ = self._home[id(parameter)]
        with group.resident():
            return self._read(group, slot)

    def _of_range(self, main: torch.Tensor) -> dict[str, Any]:
        """The state of one of the ranges that the optimizer steps."""
        for group in self._step.groups:
            for part in group.ranges:
                if part.param is main:
                    with group.resident():
                        state = self._step.optimizer.state.get(main, {})
                        is_copied = group.disk is not None
                        return {k: v.clone() if is_copied and torch.is_tensor(v) else v for k, v in state.items()}
        raise KeyError(main)

    def _read(self, group: ParameterGroup, slot: int) -> dict[str, Any]:
        parts: dict[str, list[torch.Tensor]] = defaultdict(list)
        state: dict[str, Any] = {}
        for owned, segment in group.ranges_of(slot):
            for key, value in self._step.optimizer.state.get(owned.param, {}).items():
                if is_elementwise(value, owned.param.numel()):
                    part = value[segment.start : segment.stop]
                    parts[key].append(part if group.disk is None else part.clone())
                else:
                    state[key] = value
        shape = group.buffer.layout.specs[slot].shape
        for key, tensors in parts.items():
            flat = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            state[key] = flat.view(shape) if flat.numel() == group.buffer.layout.specs[slot].numel else flat
        return state

    def __iter__(self) -> Iterator[nn.Parameter]:
        for _, _, parameter in self._home.values():
            if self[parameter]:
                yield parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        try:
            return isinstance(parameter, torch.Tensor) and bool(self[parameter])
        except KeyError:
            return False


class LastStep:
    """What the last step did. One object, so that whoever copies the optimizer's attributes sees the same."""

    def __init__(self, scaler: LossScale | None) -> None:
        self.overflow = False
        self.loss_scale = 1.0 if scaler is None else scaler.scale
        self.is_dynamic = scaler is not None and scaler.settings.is_dynamic
        self.scaler = scaler  # fp16's


# Of the wrapped optimizer, what is the returned one's until `release_wrapped`.
_HOOK_KINDS = ("step", "state_dict", "load_state_dict")
_HOOKS = tuple(f"_optimizer_{kind}_{when}_hooks" for kind in _HOOK_KINDS for when in ("pre", "post"))
_METHODS = (
    "state_dict",
    "load_state_dict",
    "add_param_group",
    *(f"register_{kind}_{when}_hook" for kind in _HOOK_KINDS for when in ("pre", "post")),
)


class ShardedOptimizer(torch.optim.Optimizer):
    """What ``initialize`` returns as the optimizer.

    ``param_groups`` are the very dicts of the wrapped optimizer (a schedule that holds either sees the other's changes)
    and list the model's parameters. ``step()`` does what ``engine.step()`` does. It stands for the wrapped optimizer:
    the two are equal.
    """

    def __init__(
        self,
        step: ShardedStep,
        engine_step: Callable[[], None],
        zero_grad: Callable[[], None],
        *,
        loss_scale: LossScale | None = None,
        local_gradient: Callable[[nn.Parameter], torch.Tensor | None] = lambda _: None,
    ) -> None:
        # The base class is not initialised on purpose: groups, defaults and hooks are the wrapped optimizer's own.
        self.optimizer = step.optimizer
        # Its own methods would look for the parameter ranges, which hold its state, among its groups' parameters, and
        # its hooks would run for each range. So this one object has others until `release_wrapped`.
        vars(self.optimizer).update({name: getattr(self, name) for name in _METHODS})
        for name in _HOOKS:
            vars(self)[name] = vars(self.optimizer).get(name, OrderedDict())
            vars(self.optimizer)[name] = OrderedDict()
        self._user_groups = [group["params"] for group in self.optimizer.param_groups]
        self._step_hook = torch.optim.Optimizer.register_step_pre_hook(self.optimizer, self._refuse_client_step)
        self.sharded_step = step
        self._engine_step = engine_step
        self._zero_grad = zero_grad
        self._state = StateByParameter(step)
        self._status = LastStep(loss_scale)
        self._local_gradient = local_gradient

    if not TYPE_CHECKING:  # a type checker would take every misspelt name for an attribute

        def __getattr__(self, name: str) -> Any:
            refuse_foreign_name(type(self), name)
            return super().__getattribute__(name)  # raises what has led here

    def release_wrapped(self) -> None:
        """The wrapped optimizer is its own again, and keeps nothing of the engine alive."""
        for name in _METHODS:
            vars(self.optimizer).pop(name, None)
        self._step_hook.remove()
        vars(self.optimizer).update({name: vars(self)[name] for name in _HOOKS})

    def _refuse_client_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Runs before each ``step()`` of the wrapped optimizer, whose groups have other lists during the engine's step.

        Raises: UsageError: the script called it. The parameters have no gradients there, or those of this rank alone.
        """
        is_own = [group["params"] is own for group, own in zip(optimizer.param_groups, self._user_groups, strict=False)]
        if any(is_own) and not any(group.gradient.is_shown for group in self.sharded_step.groups):
            raise UsageError(
                f"step() of the {type(optimizer).__name__} that initialize() was given updates nothing: the engine"
                " holds the gradients and the fp32 weights.",
                do="call engine.step(), or step() of the optimizer that initialize() returned.",
                code="optimizer-client-step",
            )

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.optimizer

    def __hash__(self) -> int:
        return hash(self.optimizer)

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped because a gradient was not finite."""
        return self._status.overflow

    @overflow.setter
    def overflow(self, value: bool) -> None:
        self._status.overflow = value

    @property
    def loss_scale(self) -> float:
        """The factor of losses under fp16; 1 otherwise."""
        return self._status.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._status.loss_scale = value

    @property
    def low_precision_dtype(self) -> torch.dtype | None:
        """The parameters' 16-bit dtype; None: they have another dtype."""
        dtypes = {group.buffer.dtype for group in self.sharded_step.groups}
        return next((dtype for dtype in (torch.float16, torch.bfloat16) if dtype in dtypes), None)

    # Attributes of the base class, which here are the wrapped optimizer's own; and a step that takes no closure.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def state(self) -> Mapping[nn.Parameter, dict[str, Any]]:  # type: ignore[override]
        return self._state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One optimizer step. Raises: OptimizerError: a closure was given."""
        if closure is not None:
            raise OptimizerError(
                "step(closure) would run the model again inside the optimizer, which sharded optimizers cannot do.",
                do="call engine.backward(loss) and then engine.step().",
                code="optimizer-closure",
            )
        self._engine_step()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Run the hooks of ``register_step_pre_hook`` before the block, in which the engine updates, and the others
        after it.
        """
        for before in list(self._optimizer_step_pre_hooks.values()):
            before(self, (self,), {})
        yield
        for after in list(self._optimizer_step_post_hooks.values()):
            after(self, (self,), {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise OptimizerError(
            "a parameter group cannot be added after initialize(): its parameters have no place in the buckets.",
            do="give the optimizer all its groups before initialize(); to add one later, destroy() the engine and"
            " initialize again.",
            code="optimizer-add-group",
        )

    def state_dict(self) -> dict[str, Any]:
        """In torch's format; the state is this rank's part of each parameter's."""
        for before in list(self._optimizer_state_dict_pre_hooks.values()):
            before(self)
        groups: list[dict[str, Any]] = []
        index_of: dict[int, int] = {}
        for group in self.param_groups:
            indices = []
            for parameter in group["params"]:
                index_of.setdefault(id(parameter), len(index_of))
                indices.append(index_of[id(parameter)])
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": indices})
        state = {index_of[id(p)]: self._state[p] for p in self._state if id(p) in index_of}
        result = {"state": state, "param_groups": groups}
        for after in list(self._optimizer_state_dict_post_hooks.values()):
            result = after(self, result) or result
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()`` of the same rank and layout. The group dicts are updated in place.

        Raises: OptimizerError: the groups or the sizes do not fit.
        """
        for before in list(self._optimizer_load_state_dict_pre_hooks.values()):
            state_dict = before(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise OptimizerError(
                f"the state has {len(groups)} parameter groups, the optimizer {len(self.param_groups)}.",
                do="build the optimizer with the groups that it had when it was saved.",
                code="optimizer-state-groups",
            )
        parameters: list[nn.Parameter] = []
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            parameters += [p for p in group["params"] if id(p) not in {id(q) for q in parameters}]
        for index, values in state_dict["state"].items():
            self.load_local_state(parameters[int(index)], values)
        self.sharded_step.state_was_loaded()
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    @torch.no_grad()
    def load_local_state(self, parameter: nn.Parameter, values: Mapping[str, Any]) -> None:
        """Set this rank's part of one parameter's optimizer state.

        Raises: OptimizerError: a tensor has another size than this rank's part.
        """
        group, slot, _ = self._state._home[id(parameter)]
        with group.resident():
            self._load_resident(group, slot, values)

    def _load_resident(self, group: ParameterGroup, slot: int, values: Mapping[str, Any]) -> None:
        owned = sum(s.stop - s.start for _, s in group.ranges_of(slot))
        done = 0
        for target, segment in group.ranges_of(slot):
            state = self.optimizer.state[target.param]
            numel = segment.stop - segment.start
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    if value.numel() != owned:
                        raise OptimizerError(
                            f"{key!r} of parameter {group.buffer.layout.specs[slot].name!r} has {value.numel()}"
                            f" elements, this rank owns {owned}.",
                            do="load the state on the rank and in the layout that saved it.",
                            code="optimizer-state-size",
                        )
                    if key not in state:
                        state[key] = torch.zeros_like(target.param.detach(), dtype=value.dtype)
                    state[key][segment.start : segment.stop].copy_(value.reshape(-1)[done : done + numel])
                else:
                    state[key] = value.clone() if isinstance(value, torch.Tensor) else value
            done += numel
