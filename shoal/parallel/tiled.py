"""Tiled computing: a function of a long sequence runs tile by tile, so that one tile's activations exist at a time.

    forward    tile -> function -> tile of the output                             saved: the inputs
    backward   tile -> function, again -> gradients of the tile, added to those of the parameters

For functions that treat each position alone: a feed-forward layer, a norm, a head with its loss. Gradients of
parameters are summed over the tiles here, in fp32 for 16-bit ones, and autograd gets each once, after the last tile:
under ZeRO a parameter is reduced once, as without tiles.

Source: ALST (arXiv:2506.13996), section 3.1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from shoal.comm.autograd import once_differentiable
from shoal.compiler import untraced
from shoal.errors import UsageError
from shoal.parallel.recompute import current_recompute
from shoal.parallel.recompute_blocks import RecomputedBlocks, find_modules

Output = Literal["tiles", "stack", "sum"]

_TENSOR = object()


def tiled(
    function: Callable[..., Tensor],
    *tiles_of: Tensor,
    num_tiles: int,
    dim: int = -2,
    arguments: Sequence[Any] = (),
    parameters: Iterable[nn.Parameter] | None = None,
    output: Output = "tiles",
) -> Tensor:
    """``function(*tiles_of, *arguments)``, computed tile by tile along ``dim``.

    Args:
        function: maps tiles to a tile of the output, of the same length along ``dim``; runs twice.
        tiles_of: tensors that are cut into tiles, of one length along ``dim``.
        num_tiles: as ``torch.chunk`` takes it: the last tile may be shorter, and there may be fewer.
        arguments: given to each call as they are.
        parameters: that ``function`` reads; None: those of the module that ``function`` is, or is a method of, else
            found by a call with one position.
        output: ``stack``: ``function`` returns a number, and the result has that of each tile, [tiles]; ``sum``: see
            ``tiled_sum``.

    Returns: the output, whole.
    Raises: UsageError: tensors of different lengths, an output that is no tile, or no positive number of tiles.
    Memory: until the backward pass the inputs; in it one tile's activations and the gradients of the parameters.
    Communicates: what ``function`` does, once for each tile, in forward and again in backward.
    """
    lengths = {each.shape[dim] for each in tiles_of}
    if num_tiles < 1 or len(lengths) != 1:
        raise UsageError(
            f"{num_tiles} tiles of tensors that have {', '.join(map(str, sorted(lengths))) or 'no'} positions along"
            f" dim {dim}.",
            where="tiled",
            do="use 1 tile or more, and tensors of one length.",
            code="tiles",
        )
    if parameters is None:
        module = _module_of(function)
        parameters = module.parameters() if module is not None else _parameters_read(function, tiles_of, arguments, dim)
    trained = [each for each in dict.fromkeys(parameters) if each.requires_grad]
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    given = tuple(_TENSOR if isinstance(each, Tensor) else each for each in arguments)
    work = _TiledCall(function, num_tiles, dim, output, len(tiles_of), tuple(trained), given)
    return _apply(work, torch.is_grad_enabled(), *tiles_of, *tensors, *trained)


def tiled_sum(
    function: Callable[..., Tensor],
    *tiles_of: Tensor,
    num_tiles: int,
    dim: int = 1,
    parameters: Iterable[nn.Parameter] | None = None,
) -> Tensor:
    """The sum of the numbers that ``function`` returns for each tile; otherwise as ``tiled``.

    ``function`` runs once: the gradients are computed in the forward pass, up to the factor that arrives in the
    backward pass. With a sum over each tile's tokens the result is that of one call with all.

    Returns: [].
    Memory: until the backward pass the inputs and all gradients, those of 16-bit parameters in fp32.
    """
    return tiled(function, *tiles_of, num_tiles=num_tiles, dim=dim, parameters=parameters, output="sum")


def tile_modules(
    model: nn.Module,
    classes: Iterable[str | type[nn.Module]] | str | type[nn.Module],
    *,
    tile_tokens: int,
    dim: int = -2,
) -> RecomputedBlocks:
    """Run modules of ``model`` in tiles without editing it: those that treat each position alone.

    Args:
        classes: each a class, the name of one, a module's full name, or a pattern of such names ("layers.*.mlp").
        tile_tokens: positions of one tile, at most; shorter inputs run as they are.
        dim: the positions' dim of the module's first argument, which is cut into tiles; the others are given as they
            are.

    Returns: the modules; ``remove()`` restores them.
    Raises: ModelError: no module matches. UsageError: ``tile_tokens`` is below 1.
    """
    if tile_tokens < 1:
        raise UsageError(f"tile_tokens = {tile_tokens}: a tile needs at least one position.", do="use 1 or more.")
    wanted = [classes] if isinstance(classes, str | type) else list(classes)
    return RecomputedBlocks(
        find_modules(model, wanted, where="tile_modules", purpose="tiled"), _Tiles(tile_tokens, dim)
    )


def num_tiles_of(length: int, num_tiles: int) -> int:
    """How many tiles ``length`` positions have, where ``num_tiles`` are asked for.

    >>> num_tiles_of(9, 6), num_tiles_of(2, 6), num_tiles_of(0, 6)
    (5, 2, 1)
    """
    return max(math.ceil(length / (math.ceil(length / num_tiles) or 1)), 1)


class _Tiles:
    """Runs a module's forward in tiles."""

    def __init__(self, tile_tokens: int, dim: int) -> None:
        self._tile_tokens = tile_tokens
        self._dim = dim

    def run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args:
            raise UsageError(
                f"module {name!r} is tiled and was called without a positional argument.",
                do="pass the tensor that is to be cut into tiles first.",
            )
        num_tiles = math.ceil(args[0].shape[self._dim] / self._tile_tokens)
        if num_tiles <= 1:
            return function(*args, **kwargs)
        call = functools.partial(function, **kwargs) if kwargs else function
        return tiled(call, args[0], num_tiles=num_tiles, dim=self._dim, arguments=args[1:])


@dataclass(frozen=True)
class _TiledCall:
    """What runs on each tile."""

    function: Callable[..., Tensor]
    num_tiles: int
    dim: int
    output: Output
    num_tiled: int  # of the tensors, those that are cut into tiles; first
    parameters: tuple[nn.Parameter, ...]
    arguments: tuple[Any, ...]  # those that are not tiled, _TENSOR in place of each tensor

    def ranges(self, length: int) -> Iterator[tuple[int, int]]:
        """Start and length of each tile."""
        step = math.ceil(length / self.num_tiles) or 1
        for number in range(num_tiles_of(length, self.num_tiles)):
            yield number * step, min(step, length - number * step)

    def call(self, tensors: Sequence[Tensor]) -> Tensor:
        """Args: tensors: tiles, then whole arguments."""
        whole = iter(tensors[self.num_tiled :])
        arguments = (next(whole) if each is _TENSOR else each for each in self.arguments)
        return self.function(*tensors[: self.num_tiled], *arguments)

    def put(self, output: Tensor, result: Tensor | None, start: int, length: int, total: int) -> Tensor:
        """Add one tile's output to the ``result``; None: of no tile yet.

        Raises: UsageError: the output is not what the tiles' outputs must be.
        """
        is_tile = self.output == "tiles"
        is_right = output.dim() > 0 and output.shape[self.dim] == length if is_tile else output.numel() == 1
        if not is_right:
            raise UsageError(
                f"the function returned a tensor of shape {tuple(output.shape)} for a tile of {length} positions.",
                where="tiled",
                do=f"return {length} positions along dim {self.dim}." if is_tile else "return one number.",
                code="tiles",
            )
        if self.output == "sum":
            return output.reshape(()) if result is None else result + output.reshape(())
        if self.output == "stack":
            return output.reshape(1) if result is None else torch.cat([result, output.reshape(1)])
        if result is None:
            shape = list(output.shape)
            shape[self.dim] = total
            result = output.new_empty(shape)
        result.narrow(self.dim, start, length).copy_(output)
        return result

    def cut(self, tensors: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
        """The tiles, then the whole tensors: leaves of a graph of their own."""
        tiles = [each.detach().narrow(self.dim, start, length) for each in tensors[: self.num_tiled]]
        made = [*tiles, *(each.detach() for each in tensors[self.num_tiled :])]
        return [leaf.requires_grad_(each.requires_grad) for leaf, each in zip(made, tensors, strict=True)]


class _TileGradients:
    """Those of the tensors and of the parameters, summed over the tiles as they come."""

    def __init__(self, work: _TiledCall, tensors: Sequence[Tensor]) -> None:
        self._work = work
        self._inputs = [*tensors, *work.parameters]
        self._sums: list[Tensor | None] = [None] * len(self._inputs)

    def add(self, leaves: Sequence[Tensor], output: Tensor, gradient: Tensor, start: int) -> None:
        """Those of one tile, from the gradient of its output."""
        inputs = [*leaves, *self._work.parameters]
        asked = [index for index, each in enumerate(inputs) if each.requires_grad]
        if not output.requires_grad:
            return
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            output, [inputs[index] for index in asked], gradient, allow_unused=True
        )
        for index, each in zip(asked, gradients, strict=True):
            if each is None:
                continue
            whole = self._sums[index]
            if index < self._work.num_tiled:
                if whole is None:
                    whole = self._sums[index] = torch.zeros_like(self._inputs[index])
                whole.narrow(self._work.dim, start, each.shape[self._work.dim]).copy_(each)
            elif whole is None:  # a copy: autograd may give one tensor for two inputs
                self._sums[index] = each.to(torch.promote_types(each.dtype, torch.float32), copy=True)
            else:
                whole.add_(each)

    def take(self, scale: Tensor | None = None) -> Iterator[Tensor | None]:
        """Each once, multiplied by ``scale``, in its input's dtype."""
        for index, each in enumerate(self._inputs):
            total, self._sums[index] = self._sums[index], None
            if total is not None:
                total = (total if scale is None else total.mul_(scale)).to(each.dtype)
            yield total


class _Replay:
    """Random states, named ones too, and autocast of a forward pass, for the second one in the backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self._rng = current_recompute().rng
        self._named_states = self._rng.get_states()
        self._cpu_state = torch.get_rng_state()
        self._devices, self._states = get_device_states(tensor)
        self._device_type = tensor.device.type
        kinds = dict.fromkeys(("cpu", self._device_type))
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @contextmanager
    def enter(self) -> Iterator[None]:
        with ExitStack() as stack:
            of_devices = self._device_type if self._devices else "cuda"  # without devices, the type does not matter
            stack.enter_context(torch.random.fork_rng(self._devices, device_type=of_devices))
            torch.set_rng_state(self._cpu_state)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._device_type)
            for kind, dtype, is_enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled))
            stack.enter_context(self._rng.restored(self._named_states))
            yield


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _TiledCall, has_backward: bool, *inputs: Tensor) -> Tensor:
        tensors = inputs[: len(inputs) - len(work.parameters)]
        is_eager = work.output == "sum" and has_backward and any(ctx.needs_input_grad)
        ctx.work, ctx.gradients = work, _TileGradients(work, tensors) if is_eager else None
        ctx.replay = _Replay(tensors[0]) if has_backward else None
        ctx.save_for_backward(*tensors)
        result: Tensor | None = None
        for start, length in work.ranges(tensors[0].shape[work.dim]):
            leaves = work.cut(tensors, start, length)
            with torch.set_grad_enabled(is_eager):
                output = work.call(leaves)
            if ctx.gradients is not None:
                ctx.gradients.add(leaves, output, torch.ones_like(output), start)
            result = work.put(output.detach(), result, start, length, tensors[0].shape[work.dim])
            del output, leaves  # before the next tile's are allocated
        assert result is not None
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        work: _TiledCall = ctx.work
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is not None:
            return (None, None, *gradients.take(gradient))
        tensors = ctx.saved_tensors
        gradients = _TileGradients(work, tensors)
        with ctx.replay.enter():
            for number, (start, length) in enumerate(work.ranges(tensors[0].shape[work.dim])):
                leaves = work.cut(tensors, start, length)
                with torch.enable_grad():
                    output = work.call(leaves)
                part = gradient
                if work.output == "tiles":
                    part = gradient.narrow(work.dim, start, length)
                elif work.output == "stack":
                    part = gradient[number]
                gradients.add(leaves, output, part.reshape(output.shape), start)
                del output, leaves
        return (None, None, *gradients.take())


# A compiler calls it as it is: a graph would hold every tile's activations.
_apply: Callable[..., Tensor] = untraced(_Tiled.apply)


def _module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module that a function is, or is a method of."""
    if isinstance(function, functools.partial):
        first = function.args[0] if function.args else None
        return first if isinstance(first, nn.Module) else _module_of(function.func)
    owner = function.__self__ if isinstance(function, MethodType) else function
    return owner if isinstance(owner, nn.Module) else None


def _parameters_read(
    function: Callable[..., Tensor], tiles_of: tuple[Tensor, ...], arguments: Sequence[Any], dim: int
) -> list[nn.Parameter]:
    """The trained parameters that a call reads, by the graph of a call with one position.

    Raises: UsageError: the call reads a tensor that was computed outside of it.
    """
    if not torch.is_grad_enabled():
        return []
    tiles = [each.detach().narrow(dim, 0, min(1, each.shape[dim])) for each in tiles_of]
    passed = [each.detach() if isinstance(each, Tensor) else each for each in arguments]
    node = torch.ones((), requires_grad=True, dtype=torch.float32, device="cpu").clone().grad_fn
    assert node is not None
    first = node._sequence_nr()
    with _Replay(tiles_of[0]).enter():
        output = function(*tiles, *passed)
    parameters: dict[nn.Parameter, None] = {}
    seen, left = set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            parameters[leaf] = None  # type: ignore[index]
        elif node._sequence_nr() < first:
            raise UsageError(
                f"the function reads a tensor with gradient that was computed outside of it (by {node.name()}).",
                where="tiled",
                do="pass the tensor as one of the arguments.",
                code="tiles",
            )
        else:
            left.extend(after for after, _ in node.next_functions)
    return list(parameters)
