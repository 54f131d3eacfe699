"""Muon on shards: momentum whose matrices are orthogonalised; everything that is not a hidden matrix gets AdamW.

    m = momentum m + (1 - momentum) g        d = momentum m + (1 - momentum) g  (Nesterov; else d = m)
    w = w (1 - lr weight_decay) - lr sqrt(max(1, rows / columns)) orthogonalize(d)

Momentum is stored as shards. In a step, d is gathered over the shard axis, each matrix is orthogonalised by one rank
(matrices are assigned by their operations, which balances the ranks), and the results are gathered. Orthogonalising
everything on every rank would save the second gather and cost (ranks) times the work: a 512 x 2048 matrix takes a CPU
core 50 times as long to orthogonalise as to receive.

A matrix of which tensor-parallel ranks hold parts is put together on one of those ranks, which orthogonalises
it, and every rank takes its part of the result.

Source: Jordan et al., Muon: an optimizer for hidden layers (kellerjordan.github.io/posts/muon); Liu et al.,
arXiv:2502.16982, for weight decay and the assignment to ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch

from shoal.comm.protocol import Communicator, Work
from shoal.device import is_fake
from shoal.errors import OptimizerError
from shoal.optim.options import check_options
from shoal.optim.whole import Interval, ParameterPart, PartTable, RangeViews, WholeTensorOptimizer, chunks
from shoal.sharding.parts import cut, paste

Method = Literal["gram", "standard"]
METHODS: tuple[Method, ...] = ("gram", "standard")

A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7
GRAM_RESTART = 2  # after this many iterations X is formed anew


def compute_dtype(method: Method, device: torch.device, like: torch.Tensor) -> torch.dtype:
    """The dtype of the iteration, and of its result: 16 bits on GPUs (fp16's longer mantissa for "gram"), fp32 on
    CPU.
    """
    if device.type == "cpu" and not is_fake(like):
        return torch.float32
    return torch.float16 if method == "gram" else torch.bfloat16


def orthogonalize(matrix: torch.Tensor, method: Method = "gram", num_steps: int = 5) -> torch.Tensor:
    """The matrix with its singular values near one. Shape: [..., rows, columns] -> the same, in ``compute_dtype``.

    Newton-Schulz replaces the singular values by numbers near one, with matrix products only:

        X = G / |G|,   then five times   X = a X + (b A + c A A) X,   A = X X^T      ("standard")

    The coefficients raise small singular values fast and leave the others in about [0.7, 1.2]; they do not converge to
    one, which Muon does not need. "gram" runs the same iteration on the small square matrix R = X X^T and multiplies X
    once at the end and once half way (the half way restart keeps 16-bit arithmetic stable): fewer operations where a
    matrix is far from square.

    Memory: about four times the matrix in the compute dtype. Zero stays zero.
    Source: Jordan et al. (see the module); for "gram" Dao et al., Gram Newton-Schulz
        (tridao.me/blog/2026/gram-newton-schulz).
    """
    x = matrix / (torch.linalg.matrix_norm(matrix, keepdim=True) + EPS)  # before the cast: fp16 ends at 65504
    x = x.to(compute_dtype(method, matrix.device, matrix))
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        x = x.mT
    x = _gram(x, num_steps) if method == "gram" and x.size(-2) < x.size(-1) else _standard(x, num_steps)
    return x.mT if is_tall else x


def _standard(x: torch.Tensor, num_steps: int) -> torch.Tensor:
    for _ in range(num_steps):
        gram = x @ x.mT
        x = A * x + (B * gram + C * (gram @ gram)) @ x
    return x


def _gram(x: torch.Tensor, num_steps: int) -> torch.Tensor:
    """One iteration is X <- P X with P = a I + b R + c R R; so R <- P R P. The product of the P is accumulated
    separately from X.
    """
    for begin, end in ((0, min(GRAM_RESTART, num_steps)), (GRAM_RESTART, num_steps)):
        gram, product = x @ x.mT, None
        for step in range(begin, end):
            factor = B * gram + C * (gram @ gram)
            factor.diagonal(dim1=-2, dim2=-1).add_(A)
            product = factor if product is None else factor @ product
            if step + 1 < end:
                gram = factor @ gram @ factor
        if product is not None:
            x = product @ x
    return x


def num_operations(rows: int, columns: int, num_steps: int = 5) -> int:
    """Multiply-adds of the standard iteration, by which matrices are assigned to ranks."""
    small, large = min(rows, columns), max(rows, columns)
    return num_steps * (2 * small * small * large + small**3)


ALIGNMENT = 64  # elements


@dataclass(frozen=True)
class Sharing:
    """Which rank orthogonalises which matrix, and where parts and results lie in the gathered buffers."""

    parts: tuple[tuple[Interval, ...], ...]  # [rank][matrix]
    places: tuple[tuple[int, ...], ...]  # [rank][matrix]: of its part, in the rank's shard of the gathered updates
    shard_numel: int
    owners: tuple[int, ...]  # [matrix]
    results: tuple[int, ...]  # [matrix]: place in the owner's shard of the gathered results
    result_numel: int


def share_out(
    parts: Sequence[Sequence[Interval]],
    shapes: Sequence[torch.Size],
    num_steps: int = 5,
    *,
    tensor_shapes: Sequence[torch.Size] | None = None,
) -> Sharing:
    """Assign each matrix to the rank with the fewest operations, the costliest matrices first. Pure arithmetic, the
    same on every rank.

    Args:
        tensor_shapes: of the tensors of which the matrices are parts; None: ``shapes``. Owners depend on these only, so
            that they are the same for all parts.
    """
    places = [list(accumulate((high - low for low, high in row), initial=0)) for row in parts]
    load = [0] * len(parts)
    filled = [0] * len(parts)
    owners, results = [0] * len(shapes), [0] * len(shapes)

    def cost(index: int) -> int:
        batch, rows, columns = _as_matrices((tensor_shapes or shapes)[index])
        return batch * num_operations(rows, columns, num_steps)

    for index in sorted(range(len(shapes)), key=lambda i: (-cost(i), i)):
        owner = min(range(len(parts)), key=lambda rank: (load[rank], rank))
        load[owner] += cost(index)
        owners[index], results[index] = owner, filled[owner]
        filled[owner] += shapes[index].numel()
    return Sharing(
        tuple(tuple(row) for row in parts),
        tuple(tuple(row[:-1]) for row in places),
        _aligned(max(row[-1] for row in places)),
        tuple(owners),
        tuple(results),
        _aligned(max(filled)),
    )


class Muon(WholeTensorOptimizer):
    """Muon, with AdamW for the groups whose ``use_muon`` is false.

    Args:
        params: groups; each may set ``use_muon`` (default true). Matrices of more than three dims count as [first,
            rest], those of three as a stack of matrices.
        momentum, nesterov, ns_method, ns_steps: of the Muon groups.
        betas, eps: of the AdamW groups.

    Where weights and momentum lie in host memory, momentum is updated there, and matrices are gathered and
    orthogonalised on the device.

    Raises: OptimizerError: a number outside its range, or a parameter with fewer than two dims in a Muon group.
    """

    moves_to_device = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_method: Method = "gram",
        ns_steps: int = 5,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        use_muon: bool = True,
    ) -> None:
        check_options(
            "Muon",
            not_negative={"lr": lr},
            betas=betas,
            others={
                f"momentum is {momentum}, expected a number in [0, 1)": not 0 <= momentum < 1,
                f"ns_method is {ns_method!r}, expected one of {', '.join(METHODS)}": ns_method not in METHODS,
                f"ns_steps is {ns_steps}, expected at least 1": ns_steps < 1,
            },
        )
        self._sharings: dict[Hashable, Sharing] = {}
        self._buffers: dict[Hashable, _Buffer] = {}
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "ns_method": ns_method,
            "ns_steps": ns_steps,
            "nesterov": nesterov,
            "betas": betas,
            "eps": eps,
            "use_muon": use_muon,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.

        Raises: OptimizerError: a vector or number in a group that uses Muon.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        flat = [tuple(param.shape) for param in group["params"] if param.dim() < 2]
        if group["use_muon"] and flat:
            raise OptimizerError(
                f"Muon needs matrices, but group {len(self.param_groups) - 1} has {len(flat)} parameters of fewer than "
                f"two dims, the first of shape {flat[0]}.",
                do='put them into a group with "use_muon": False, which gets AdamW.',
                code="optimizer-muon-dims",
            )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["use_muon"] else ("exp_avg", "exp_avg_sq")

    def _update(self, flats: Sequence[RangeViews], comm: Communicator | None, tp: Communicator | None) -> None:
        """Update ranges.

        Communicates: for the unit's Muon matrices, one all_gather of the updates (fp32) and one of the results (16
            bits on GPUs), each about (size - 1) / size of the matrices' elements received per rank; and the exchange
            of ``PartTable``. Along ``tp``, of the matrices that this rank's shard orthogonalises, one reduce_scatter
            (fp32) and one all_gather of the results, each about (size - 1) / size of the whole matrices' elements.
        Memory: all these buffers, on the device; not freed between steps.
        """
        matrices = [flat for flat in flats if flat.group["use_muon"] and flat.shapes]
        for flat in flats:
            if flat.group["use_muon"]:
                flat.count()
            else:
                _adamw(flat)
        if comm is None:
            self._update_alone(matrices, tp)
        elif matrices:
            self._update_shared(matrices, comm, tp)

    def _update_alone(self, flats: Sequence[RangeViews], tp: Communicator | None) -> None:
        updates: list[_Update] = []
        for flat in flats:
            for part in flat.parts:
                update = torch.empty(part.numel, dtype=torch.float32, device=flat.device)
                _momentum(flat, part, update)
                if tp is None:
                    _descend(flat, part, _orthogonalized(update, part.shape, flat.group))
                else:
                    updates.append((update, flat, part.parameter))
        if tp is not None:
            parts = [(flat, part) for flat in flats for part in flat.parts]
            for (flat, part), direction in zip(parts, self._orthogonalized_parts(updates, tp), strict=True):
                _descend(flat, part, direction)

    def _orthogonalized_parts(self, updates: Sequence[_Update], tp: Communicator) -> list[torch.Tensor]:
        """This rank's part of each orthogonalised matrix, of which it has its part of the update. Shape: [numel] each.

        Every rank along ``tp`` passes the same matrices.
        """
        if not updates:
            return []
        device, group = updates[0][0].device, updates[0][1].group
        specs = [flat.specs[index] for _, flat, index in updates]
        shapes = [flat.tensor_shape(index) for _, flat, index in updates]
        key = (tp.size, tuple(shapes))
        sharing = self._sharings.get(key)
        if sharing is None:
            nothing = [[(0, 0)] * len(shapes)] * tp.size
            sharing = self._sharings[key] = share_out(nothing, shapes, group["ns_steps"])
        matrices = self._buffer(tp, "matrices", sharing.result_numel, torch.float32, device)
        dtype = compute_dtype(group["ns_method"], device, updates[0][0])
        results = self._buffer(tp, "results", sharing.result_numel, dtype, device)

        def place(buffer: _Buffer, number: int) -> torch.Tensor:
            shard = buffer.shard(sharing.owners[number])[sharing.results[number] :]
            return shard[: shapes[number].numel()].view(shapes[number])

        matrices.used.zero_()  # each element has one summand that is not zero
        for number, ((update, _, _), spec) in enumerate(zip(updates, specs, strict=True)):
            paste(update.view(spec.shape), spec, place(matrices, number))
        matrices.reduce_scatter("muon.matrices")
        for number, (_, flat, _) in enumerate(updates):
            if sharing.owners[number] == tp.rank:
                matrix, result = place(matrices, number), place(results, number)
                result.copy_(_orthogonalized(matrix.reshape(-1), shapes[number], flat.group).view(result.shape))
        results.gather("muon.parts")
        return [cut(place(results, number), spec).reshape(-1) for number, spec in enumerate(specs)]

    def _update_shared(self, flats: Sequence[RangeViews], comm: Communicator, tp: Communicator | None) -> None:
        table = PartTable(flats, comm)
        numbered = [(flat, index) for flat in flats for index in range(len(flat.shapes))]
        tensor_shapes = [flat.tensor_shape(index) for flat, index in numbered]
        key = (table.key, tuple(tensor_shapes))
        sharing = self._sharings.get(key)
        if sharing is None:
            ranks = [table.of(rank) for rank in range(comm.size)]
            num_steps = flats[0].group["ns_steps"]
            sharing = share_out(ranks, table.shapes, num_steps, tensor_shapes=tensor_shapes)
            self._sharings[key] = sharing
        device = flats[0].device

        updates = self._buffer(comm, "updates", sharing.shard_numel, torch.float32, device)
        own = updates.shard(comm.rank)
        for number, (flat, index) in enumerate(numbered):
            low, high = sharing.parts[comm.rank][number]
            place = own[sharing.places[comm.rank][number] :][: high - low]
            part = _part_of(flat, index)
            if part is None:
                place.zero_()  # not updated in this step
            else:
                _momentum(flat, part, place)
        updates.gather("muon.updates")

        dtype = compute_dtype(flats[0].group["ns_method"], device, flats[0].weight)
        results = self._buffer(comm, "results", sharing.result_numel, dtype, device)
        of_parts: list[tuple[torch.Tensor, _Update]] = []  # a part's place among the results, and its update
        for number, (flat, index) in enumerate(numbered):
            if sharing.owners[number] != comm.rank:
                continue
            shape = table.shapes[number]
            whole = own.new_empty(shape.numel())
            for rank, row in enumerate(sharing.parts):
                low, high = row[number]
                whole[low:high] = updates.shard(rank)[sharing.places[rank][number] :][: high - low]
            place = results.shard(comm.rank)[sharing.results[number] :][: shape.numel()]
            if tp is None:
                place.copy_(_orthogonalized(whole, shape, flat.group))
            else:
                of_parts.append((place, (whole, flat, index)))
        if tp is not None:
            result = self._orthogonalized_parts([update for _, update in of_parts], tp)
            for (place, _), own in zip(of_parts, result, strict=True):
                place.copy_(own)
        results.gather("muon.results")

        for number, (flat, index) in enumerate(numbered):
            part = _part_of(flat, index)
            if part is not None:
                place = results.shard(sharing.owners[number])[sharing.results[number] + part.offset :]
                _descend(flat, part, place[: part.numel])

    def _buffer(
        self, comm: Communicator, use: str, shard_numel: int, dtype: torch.dtype, device: torch.device
    ) -> _Buffer:
        key = (id(comm), use, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.capacity < shard_numel:
            if buffer is not None:
                buffer.free()
            buffer = self._buffers[key] = _Buffer(comm, comm.empty(shard_numel * comm.size, dtype, device))
        buffer.begin(shard_numel)
        return buffer


class _Buffer:
    """The buffers that a communicator gathers into; every unit and step reuses them."""

    def __init__(self, comm: Communicator, memory: torch.Tensor) -> None:
        self.comm = comm
        self._memory = memory
        self._shard_numel = 0
        self._work: Work | None = None

    @property
    def capacity(self) -> int:
        return self._memory.numel() // self.comm.size

    def begin(self, shard_numel: int) -> None:
        self.free()
        self._shard_numel = shard_numel

    @property
    def used(self) -> torch.Tensor:
        """The shards of all ranks."""
        return self._memory[: self._shard_numel * self.comm.size]

    def shard(self, rank: int) -> torch.Tensor:
        return self._memory[rank * self._shard_numel : (rank + 1) * self._shard_numel]

    def gather(self, label: str) -> None:
        self._work = self.comm.all_gather(self.used, label=label)
        self._work.wait()

    def reduce_scatter(self, label: str) -> None:
        self._work = self.comm.reduce_scatter(self.used, self.shard(self.comm.rank), label=label)
        self._work.wait()

    def free(self) -> None:
        """Wait until no peer reads it."""
        if self._work is not None:
            self._work.drain()
            self._work = None


_Update = tuple[torch.Tensor, RangeViews, int]  # of a matrix [numel]; the range and the index of its parameter


def _part_of(flat: RangeViews, index: int) -> ParameterPart | None:
    return next((part for part in flat.parts if part.parameter == index), None)


def _as_matrices(shape: torch.Size) -> tuple[int, int, int]:
    """A parameter as (stack, rows, columns)."""
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], shape[1:].numel()


def _aligned(numel: int) -> int:
    return max(-(-numel // ALIGNMENT), 1) * ALIGNMENT


def _orthogonalized(update: torch.Tensor, shape: torch.Size, group: dict[str, Any]) -> torch.Tensor:
    """Shape: [numel] -> [numel]."""
    if update.numel() == 0:
        return update
    return orthogonalize(update.view(_as_matrices(shape)).squeeze(0), group["ns_method"], group["ns_steps"]).reshape(-1)


def _momentum(flat: RangeViews, part: ParameterPart, out: torch.Tensor) -> None:
    """Update a part's momentum and write the direction into ``out``. Shape: [part numel]."""
    assert flat.gradient is not None
    target, beta = out, flat.group["momentum"]
    if out.device != flat.weight.device:
        out = torch.empty_like(out, device=flat.weight.device)
    for begin, end in chunks(part.start, part.stop, flat.weight.device):
        grad = flat.gradient[begin:end].to(flat.weight.dtype)
        average = flat.state["momentum_buffer"][begin:end]
        average.mul_(beta).add_(grad, alpha=1 - beta)
        direction = average * beta + grad * (1 - beta) if flat.group["nesterov"] else average
        out[begin - part.start : end - part.start] = direction
    if out is not target:
        target.copy_(out)


def _descend(flat: RangeViews, part: ParameterPart, direction: torch.Tensor) -> None:
    group = flat.group
    _, rows, columns = _as_matrices(flat.tensor_shape(part.parameter))
    scale = max(1.0, rows / max(columns, 1)) ** 0.5
    weight = flat.weight[part.start : part.stop]
    if group["weight_decay"]:
        weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.sub_(direction.to(weight.device).to(weight.dtype) * (group["lr"] * scale))  # copied to the host in 16 bits


def _adamw(flat: RangeViews) -> None:
    """AdamW on the parts. Source: Loshchilov and Hutter, arXiv:1711.05101."""
    group = flat.group
    beta1, beta2 = group["betas"]
    for part, step in zip(flat.parts, flat.count(), strict=True):
        assert flat.gradient is not None
        size = group["lr"] / (1 - beta1**step)
        root = (1 - beta2**step).sqrt()
        for begin, end in chunks(part.start, part.stop, flat.weight.device):
            grad = flat.gradient[begin:end].to(flat.weight.dtype)
            average, square = flat.state["exp_avg"][begin:end], flat.state["exp_avg_sq"][begin:end]
            average.mul_(beta1).add_(grad, alpha=1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            weight = flat.weight[begin:end]
            if group["weight_decay"]:
                weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(average / (square.sqrt() / root).add_(group["eps"]) * size)
