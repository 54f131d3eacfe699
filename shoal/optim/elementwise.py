"""Checks that an optimizer is elementwise: that an element's update depends on that element alone.

Where several ranks share the state, Shoal steps flat ranges of the main parameters, unit by unit. That changes nothing
for an elementwise optimizer, and is wrong for any other. Known classes are accepted by name. An unknown class is tried
on a matrix, and on tensors of the sizes of the model's parameters: it must give the same bits when it steps a tensor
whole, flat, in two parts, and in two parts one after the other (as units are), and its state must not be a matrix of
another shape or a vector of one dim. What it does after the steps of the trial, and at larger sizes, is not known.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.comm.environment import warn_on_rank_0
from shoal.config.optimizer import INSTEAD, NOT_ELEMENTWISE
from shoal.errors import OptimizerError
from shoal.optim.lion import Lion
from shoal.optim.one_bit import OneBitAdam, ZeroOneAdam
from shoal.optim.variants import AdamWithBias, FP32States
from shoal.optim.whole import WholeTensorOptimizer

OptimizerKind = Literal["elementwise", "whole-tensor", "direct"]  # direct: it steps the model's own parameters

KNOWN: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    AdamWithBias,
    Lion,
    OneBitAdam,
    ZeroOneAdam,
)


PROBE_SHAPE = (96, 128)  # more than 4096 elements: below that, 8-bit optimizers keep full precision
PROBE_CUT = 65 * 64  # both parts are multiples of 64 elements, as Shoal's ranges are, and of no larger block
PROBE_STEPS = 3
PROBE_MORE_STEPS = 32  # on the smaller ones of the model's sizes: some optimizers precondition from their 25th step on
PROBE_NUMEL = 1 << 16  # of one of the model's sizes; of a larger one the first rows

# Ranks that are threads have one random state. And where torch copies it, it holds a lock that another thread waits for
# with Python's global lock, which a garbage collection in the first one may wait for.
_ONE_AT_A_TIME = threading.Lock()


class UntestedOptimizerError(OptimizerError, AssertionError):
    """An unknown class where the config refuses these. Also an AssertionError, as DeepSpeed raises."""

    code = "optimizer-untested"


def check(
    optimizer: torch.optim.Optimizer,
    *,
    allow_untested: bool = False,
    refuse_untested: bool = False,
    world_size: int | None = None,
    stage: int | None = None,
    has_whole: bool = False,
) -> OptimizerKind:
    """Check that a client's optimizer can run on shards.

    Args:
        allow_untested: ``zero_allow_untested_optimizer``: accept a class that cannot be tried, with a warning.
        refuse_untested: the same key, set to false: refuse an unknown class without trying it.
        world_size: ranks that shard the optimizer state; None: unknown, taken as more than one.
        stage: the ZeRO stage. At stage 0 an optimizer of sparse gradients, or one that contains others, is stepped
            directly.
        has_whole: each rank has every parameter, whole, with its state (stage 0, or one rank): an unknown class is
            stepped directly, as without Shoal, and nothing is asked of it.

    Returns: how the engine steps it.
    Raises: OptimizerError: the optimizer is not elementwise, or its class is unknown and cannot be tried. A trial whose
        comparison fails is an error also with ``allow_untested``, unless there is only one rank.
    """
    kind = type(optimizer)
    if isinstance(optimizer, WholeTensorOptimizer):
        return "whole-tensor"
    if _needs_closure(kind):
        raise OptimizerError(
            f"{kind.__name__}.step() needs a closure that runs the model again, which a sharded optimizer cannot do.",
            do="use an optimizer whose step() takes no argument.",
            code="optimizer-closure",
        )
    if takes_sparse_only(optimizer) and stage == 0:
        return "direct"
    if is_known(kind):
        return "elementwise"
    for name, reason in NOT_ELEMENTWISE.items():
        base = getattr(torch.optim, name, None)
        if isinstance(base, type) and isinstance(optimizer, base):
            if has_whole:
                return "direct"
            raise refusal(name, reason)
    if refuse_untested:
        raise UntestedOptimizerError(
            f'{kind.__name__} is not an optimizer that Shoal knows, and "zero_allow_untested_optimizer" is false.',
            do="leave the key out: the optimizer is then tested on a small matrix; or set it to true.",
        )
    if has_whole:
        return "direct"
    inner = inner_optimizers(optimizer)
    is_direct = bool(inner) and (stage == 0 or has_own_groups(optimizer))
    try:
        with unset_fake_temporarily():  # the trial has values in a dry run, too
            difference = _first_difference(optimizer)
    except Exception as problem:
        if is_direct:
            return _direct(optimizer, inner, stage)
        message = (
            f"{kind.__name__} is not known to be elementwise, and could not be tried on a small matrix: "
            f"{type(problem).__name__}: {problem}"
        )
        if allow_untested:
            warn_on_rank_0(f"{message}. It is used because zero_allow_untested_optimizer is set.")
            return "elementwise"
        raise OptimizerError(
            message + ".",
            do="use a torch.optim optimizer, or, if you know that it is elementwise, set"
            ' "zero_allow_untested_optimizer": true.',
            code="optimizer-untested",
        ) from problem
    if difference is None:
        return "elementwise"
    if is_direct:
        return _direct(optimizer, inner, stage)
    message = f"{kind.__name__} is not elementwise: {difference}"
    if allow_untested and world_size == 1:
        warn_on_rank_0(
            f"{message}. It is used on one rank because zero_allow_untested_optimizer is set; its results will differ."
        )
        return "elementwise"
    raise OptimizerError(
        message + ", so its updates of shards would be wrong.",
        do="use an elementwise optimizer, or stage 0 (each rank then steps whole parameters, as in plain PyTorch), or"
        " derive it from shoal.optim.whole.WholeTensorOptimizer.",
        code="optimizer-not-elementwise",
    )


def _direct(
    optimizer: torch.optim.Optimizer, inner: Sequence[torch.optim.Optimizer], stage: int | None
) -> OptimizerKind:
    """Raises: OptimizerError: the optimizer contains others, which would step whole parameters; no rank has these."""
    if stage == 0:
        return "direct"
    raise OptimizerError(
        f"{type(optimizer).__name__} holds optimizers of its own ({', '.join(type(o).__name__ for o in inner)}), which"
        " step the model's parameters themselves; from stage 1 on a rank steps its range of them only.",
        do="take stage 0, or one optimizer with a parameter group for each.",
        code="optimizer-of-optimizers",
    )


def refusal(name: str, reason: str) -> OptimizerError:
    """The error for one of torch's optimizers that cannot run on shards."""
    return OptimizerError(
        f"torch.optim.{name} is not elementwise: {reason}.",
        do=INSTEAD.get(name, "use an elementwise optimizer, such as AdamW; or pass it as optimizer= with stage 0."),
        code="optimizer-not-elementwise",
    )


def _needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    parameters = list(inspect.signature(inspect.unwrap(kind.step)).parameters.values())[1:]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in positional and p.default is p.empty for p in parameters)


def is_known(kind: type) -> bool:
    """True for a known class, or one derived from it with a changed constructor and additional names only."""
    known = next((base for base in kind.__mro__ if base in KNOWN), None)
    if known is None:
        return False
    for base in kind.__mro__[: kind.__mro__.index(known)]:
        for name, value in vars(base).items():
            is_constructor = name.startswith(("__", "_patch"))
            if is_constructor or not callable(value) or not hasattr(known, name):
                continue
            # torch wraps step() of the class in place, for its profiler. That of FP32States is the known class's
            # with casts around it.
            originals = [inspect.unwrap(getattr(cls, name)) for cls in (known, FP32States) if hasattr(cls, name)]
            if not any(inspect.unwrap(value) is original for original in originals):
                return False
    return True


def _first_difference(optimizer: torch.optim.Optimizer) -> str | None:
    """What the trial shows, or None. Raises: what the optimizer's constructor or step raises."""
    tried: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        settings = settings_of(type(optimizer), group)
        make = partial(type(optimizer), **settings)
        device = next((p.device for p in group["params"] if p.device.type != "meta"), torch.device("cpu"))
        trials: dict[tuple[int, ...], int] = {} if settings in tried else {PROBE_SHAPE: PROBE_STEPS}
        trials |= dict.fromkeys(_sizes_of(group["params"]), PROBE_MORE_STEPS)
        tried.append(settings)
        for shape, steps in trials.items():
            result = _try(make, device, shape, steps)
            if result:
                return result
    return None


def _sizes_of(parameters: Iterable[torch.Tensor]) -> list[tuple[int, ...]]:
    """The smallest and the largest shape of each number of dims, with as many rows as are tried."""
    shapes = sorted({tuple(p.shape) for p in parameters if p.numel() > 1}, key=lambda shape: torch.Size(shape).numel())
    chosen = {len(shape): shape for shape in reversed(shapes)}, {len(shape): shape for shape in shapes}
    cut = (
        (max(1, min(rows, PROBE_NUMEL // torch.Size(columns).numel())), *columns)
        for each in chosen
        for rows, *columns in each.values()
    )
    return [shape for shape in dict.fromkeys(cut) if torch.Size(shape).numel() <= 4 * PROBE_NUMEL]


def settings_of(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of the group that the constructor accepts, as plain values."""
    parameters = inspect.signature(kind).parameters
    result = {}
    for name, value in group.items():
        if name in parameters and name != "params":
            result[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return result


def _try(
    make: Callable[[Any], torch.optim.Optimizer], device: torch.device, shape: tuple[int, ...], num_steps: int
) -> str | None:
    random = torch.Generator().manual_seed(0)
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    start = torch.randn(shape, generator=random, dtype=torch.float32, device="cpu").to(device)
    # rows and columns differ in size, so that an optimizer that mixes elements gives other numbers
    sizes = (
        torch.logspace(-2, 1, rows, dtype=torch.float32, device="cpu").unsqueeze(1)
        * torch.linspace(0.5, 2, columns, dtype=torch.float32, device="cpu")
    ).view(shape)
    grads = [
        (torch.randn(shape, generator=random, dtype=torch.float32, device="cpu") * sizes).to(device)
        for _ in range(num_steps)
    ]
    text = "a matrix" if shape == PROBE_SHAPE else f"a tensor of shape {shape}"

    def run(slices: Sequence[slice] | None, *, in_turn: bool = False) -> torch.Tensor:
        if slices is None:
            params = [torch.nn.Parameter(start.clone())]
        else:
            params = [torch.nn.Parameter(start.flatten()[part].clone()) for part in slices]
        optimizer = make(params)
        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for grad in grads:
                if slices is None:
                    params[0].grad = grad.clone()
                else:
                    for param, part in zip(params, slices, strict=True):
                        param.grad = grad.flatten()[part].clone()
                for batch in [[param] for param in params] if in_turn else [params]:
                    optimizer.param_groups[0]["params"] = batch
                    optimizer.step()
        if slices is None:
            shapes.update({name: tuple(t.shape) for t, name in _tensors_in(optimizer.state[params[0]], "state")})
        return torch.cat([param.detach().flatten() for param in params])

    shapes: dict[str, tuple[int, ...]] = {}
    whole = run(None)
    if not torch.isfinite(whole).all():
        raise ArithmeticError("the trial's weights are not finite")
    numel = start.numel()
    trials = {f"{text} and the same numbers flat": run([slice(0, numel)])}
    cut = PROBE_CUT if shape == PROBE_SHAPE else numel // 128 * 64
    if cut:
        halves = (slice(0, cut), slice(cut, numel))
        trials[f"{text} and its two parts"] = run(halves)
        trials[f"{text} and its two parts, each in a step() of its own"] = run(halves, in_turn=True)
    for what, result in trials.items():
        if not torch.equal(whole, result):
            difference = (whole - result).abs().max().item()
            return f"after {num_steps} steps {what} differ by up to {difference:.3g}"
    for name, state_shape in shapes.items():
        of_a_dim = shape == PROBE_SHAPE and set(state_shape) & set(shape)
        if state_shape != shape and (sum(n > 1 for n in state_shape) > 1 or of_a_dim):
            return (
                f"for a tensor of shape {shape} it keeps {name} of shape {state_shape}, which belongs to no one element"
            )
    return None


def _tensors_in(value: Any, name: str, depth: int = 0) -> Iterator[tuple[torch.Tensor, str]]:
    """Every tensor in a state, in objects too, with its name."""
    if isinstance(value, torch.Tensor):
        yield value, name
    elif depth < 6:
        items = vars(value) if hasattr(value, "__dict__") else value
        items = dict(enumerate(items)) if isinstance(items, list | tuple) else items
        for key, item in items.items() if isinstance(items, Mapping) else ():
            yield from _tensors_in(item, f"{name}[{key!r}]", depth + 1)


# optimizers that hold other optimizers (an Adam for dense weights, a SparseAdam for tables), or take sparse gradients


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers among an optimizer's attributes (lists, tuples and dicts included), recursively. Each once."""
    result: list[torch.optim.Optimizer] = []

    def search(holder: torch.optim.Optimizer) -> None:
        for name, value in vars(holder).items():
            if name in ("state", "param_groups", "defaults"):
                continue
            values = list(value.values()) if isinstance(value, Mapping) else value
            for each in values if isinstance(values, list | tuple) else (values,):
                if isinstance(each, torch.optim.Optimizer) and not any(each is one for one in (optimizer, *result)):
                    result.append(each)
                    search(each)

    search(optimizer)
    return result


def has_own_groups(optimizer: torch.optim.Optimizer) -> bool:
    """True if it contains an optimizer with other groups than its own. (A wrapper shares those of what it wraps.)"""
    own = {id(group) for group in optimizer.param_groups}
    return any(id(group) not in own for each in inner_optimizers(optimizer) for group in each.param_groups)


def takes_sparse_only(optimizer: torch.optim.Optimizer) -> bool:
    """True if it refuses a gradient that is not a sparse tensor."""
    return isinstance(optimizer, torch.optim.SparseAdam)


def of_sparse_only(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ``id`` of each parameter that the optimizer, or one inside it, steps."""
    return {
        id(parameter)
        for holder in (optimizer, *inner_optimizers(optimizer))
        if takes_sparse_only(holder)
        for group in holder.param_groups
        for parameter in group["params"]
    }
