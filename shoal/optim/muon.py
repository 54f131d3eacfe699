"""Muon on shards: momentum whose matrices are orthogonalised; everything that is not a hidden matrix gets AdamW.

    m = momentum m + (1 - momentum) g        d = momentum m + (1 - momentum) g  (Nesterov; else d = m)
    w = w (1 - lr weight_decay) - lr sqrt(max(1, rows / columns)) orthogonalize(d)

Momentum is stored as shards. Each matrix is orthogonalised by one rank: in a step, ranks send it their parts of d, and
it sends each its part of the result.

    rank 0  parts of A, B, C --+              +--> A  orthogonalize --+              +--> parts of A, B, C
    rank 1  parts of A, B, C --+- all_to_all -+--> B  orthogonalize --+- all_to_all -+--> parts of A, B, C
    rank 2  parts of A, B, C --+    (fp32)    +--> C  orthogonalize --+   (16 bits)  +--> parts of A, B, C

Matrices are assigned by their operations, over the units of one call, so that ranks have as much to compute; while a
rank computes, the parts of the next units are sent, and the results of those before.

A matrix of which tensor-parallel ranks hold parts is put together on one of those ranks, which orthogonalises
it, and every rank takes its part of the result.

Source: Jordan et al., Muon: an optimizer for hidden layers (kellerjordan.github.io/posts/muon); Liu et al.,
arXiv:2502.16982, for weight decay and the assignment to ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch

from shoal.comm.protocol import Communicator
from shoal.device import is_fake
from shoal.errors import OptimizerError
from shoal.optim.options import check_options
from shoal.optim.whole import HeldPart, Loads, ParameterPart, PartTable, RangeViews, WholeTensorOptimizer, chunks
from shoal.sharding.layout import ParameterSpec, Ranges
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


class MatrixPart(NamedTuple):
    """The part of a matrix that a rank holds."""

    number: int  # of the matrix
    rank: int
    begin: int  # of its elements, flattened: of the whole matrix, or of what a tensor-parallel rank holds of it
    end: int


@dataclass(frozen=True)
class Sharing:
    """Which rank orthogonalises which matrix, and what one rank sends to it and gets for it.

    Attributes: ``owners``: by matrix. ``own``: the matrices of this rank. ``sent``: parts that this rank holds, in the
    order of their owners; ``sent_splits``: elements for each owner. ``received``: parts of ``own``, in the order of the
    ranks that hold them; ``received_splits``: elements from each. Results go the other way. ``loads``: operations that
    each rank has to do then.
    """

    owners: tuple[int, ...]
    own: tuple[int, ...]
    sent: tuple[MatrixPart, ...]
    sent_splits: tuple[int, ...]
    received: tuple[MatrixPart, ...]
    received_splits: tuple[int, ...]
    loads: tuple[int, ...]


def share_out(
    holders: Sequence[Sequence[HeldPart]],
    tensor_shapes: Sequence[torch.Size],
    loads: Sequence[int],
    rank: int,
    num_steps: int = 5,
) -> Sharing:
    """Assign each matrix to the rank with the fewest operations, the costliest matrices first. Pure arithmetic, the
    same on every rank.

    Args:
        holders: of each matrix: the ranks that hold it, and what they hold.
        tensor_shapes: of the tensors that the matrices are, or are parts of. Owners depend on these only, so that they
            are the same for all parts.
        loads: operations that each rank has to do before.
    """

    def cost(index: int) -> int:
        batch, rows, columns = _as_matrices(tensor_shapes[index])
        return batch * num_operations(rows, columns, num_steps)

    owners = [0] * len(tensor_shapes)
    heap = [(load, each) for each, load in enumerate(loads)]
    heapify(heap)
    for index in sorted(range(len(tensor_shapes)), key=lambda i: (-cost(i), i)):
        load, owner = heap[0]
        heapreplace(heap, (load + cost(index), owner))
        owners[index] = owner
    by_owner: list[list[MatrixPart]] = [[] for _ in loads]
    by_holder: list[list[MatrixPart]] = [[] for _ in loads]
    for index, (owner, parts) in enumerate(zip(owners, holders, strict=True)):
        for part in (MatrixPart(index, *each) for each in parts):
            if part.rank == rank:
                by_owner[owner].append(part)
            if owner == rank:
                by_holder[part.rank].append(part)
    return Sharing(
        tuple(owners),
        tuple(index for index, owner in enumerate(owners) if owner == rank),
        *_in_order(by_owner),
        *_in_order(by_holder),
        tuple(load for _, load in sorted((owner, load) for load, owner in heap)),
    )


def _in_order(parts: Sequence[Sequence[MatrixPart]]) -> tuple[tuple[MatrixPart, ...], tuple[int, ...]]:
    return tuple(chain.from_iterable(parts)), tuple(sum(_sizes(each)) for each in parts)


def _sizes(parts: Iterable[MatrixPart]) -> list[int]:
    return [part.end - part.begin for part in parts]


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
        self._specs: dict[Hashable, list[list[ParameterSpec]]] = {}
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

    def _update(
        self, flats: Sequence[RangeViews], comm: Communicator | None, tp: Communicator | None, loads: Loads
    ) -> Iterator[None]:
        """Update ranges.

        Communicates: for the Muon matrices one all_to_all of the updates (fp32), of which a rank receives the matrices
            that it orthogonalises, and one of the results (16 bits on GPUs), of which it receives its shard; and the
            exchange of ``PartTable``. Along ``tp``, for what this rank receives of matrices, the same again; before
            the first one every rank learns which parts the others have.
        Memory: on the device, of this rank's shard and of the matrices that it orthogonalises: updates, then results.
        """
        matrices = [flat for flat in flats if flat.group["use_muon"] and flat.shapes]
        for flat in flats:
            if flat.group["use_muon"]:
                flat.count()
            else:
                _adamw(flat)
        if comm is None:
            yield from self._update_alone(matrices, tp, loads)
        elif matrices:
            yield from self._update_shared(matrices, comm, tp, loads)

    def _update_alone(self, flats: Sequence[RangeViews], tp: Communicator | None, loads: Loads) -> Iterator[None]:
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
            directions = yield from self._orthogonalized_parts(updates, tp, loads)
            for (flat, part), direction in zip(parts, directions, strict=True):
                _descend(flat, part, direction)

    def _update_shared(
        self, flats: Sequence[RangeViews], comm: Communicator, tp: Communicator | None, loads: Loads
    ) -> Iterator[None]:
        table = PartTable(flats, comm)
        numbered = [(flat, index) for flat in flats for index in range(len(flat.shapes))]
        sharing = self._sharing(table.key, table.holders, numbered, comm, loads)
        parts = [_part_of(*numbered[part.number]) for part in sharing.sent]

        def fill(places: Sequence[torch.Tensor]) -> None:
            for (number, *_), part, place in zip(sharing.sent, parts, places, strict=True):
                if part is None:
                    place.zero_()  # not updated in this step
                else:
                    _momentum(numbered[number][0], part, place)

        def whole(number: int, received: Sequence[_Received]) -> torch.Tensor:
            if received:
                return torch.cat([values for _, values in received])
            flat, index = numbered[number]  # no rank updates it in this step
            return torch.zeros(flat.shapes[index].numel(), dtype=torch.float32, device=flat.device)

        def results_of(updates: Sequence[_Update]) -> _Results:
            if tp is not None:
                return (yield from self._orthogonalized_parts(updates, tp, loads))
            return [_orthogonalized(update, flat.shapes[index], flat.group) for update, flat, index in updates]

        def part_of(result: torch.Tensor, part: MatrixPart) -> torch.Tensor:
            return result[part.begin : part.end]

        directions = yield from _by_owners(sharing, comm, numbered, "muon", fill, whole, results_of, part_of)
        for (number, *_), part, direction in zip(sharing.sent, parts, directions, strict=True):
            if part is not None:
                _descend(numbered[number][0], part, direction)

    def _orthogonalized_parts(self, updates: Sequence[_Update], tp: Communicator, loads: Loads) -> _Results:
        """This rank's part of each orthogonalised matrix, of which it has its part of the update. Shape: [numel] each.

        Every rank along ``tp`` passes the same matrices. Stacks of which each rank has whole matrices (of its experts)
        are not exchanged. It stops twice on every rank, also on one without matrices: what the others issue after their
        stops comes in the same order.
        """
        is_split = [_is_split(flat.specs[index]) for _, flat, index in updates]
        split = [update for update, is_one in zip(updates, is_split, strict=True) if is_one]
        exchanged = iter((yield from self._exchanged_parts(split, tp, loads)))
        return [
            next(exchanged) if is_one else _orthogonalized(update, torch.Size(flat.specs[index].shape), flat.group)
            for (update, flat, index), is_one in zip(updates, is_split, strict=True)
        ]

    def _exchanged_parts(self, updates: Sequence[_Update], tp: Communicator, loads: Loads) -> _Results:
        if not updates:
            for _ in range(_STOPS):
                yield
            return []
        numbered = [(flat, index) for _, flat, index in updates]
        own = [flat.specs[index] for flat, index in numbered]
        key = (id(tp), tuple((spec.name, spec.local) for spec in own))
        if (specs := self._specs.get(key)) is None:
            specs = self._specs[key] = [
                [
                    ParameterSpec.part(spec.name, spec.global_shape, _as_ranges(local))
                    for spec, local in zip(own, of_rank, strict=True)
                ]
                for of_rank in tp.gather_objects([spec.local for spec in own], label="muon.specs")
            ]

        def holders() -> list[list[HeldPart]]:
            return [[(rank, 0, spec.numel) for rank, spec in enumerate(each)] for each in zip(*specs, strict=True)]

        sharing = self._sharing(key, holders, numbered, tp, loads)

        def fill(places: Sequence[torch.Tensor]) -> None:
            for part, place in zip(sharing.sent, places, strict=True):
                place.copy_(updates[part.number][0])

        def whole(number: int, received: Sequence[_Received]) -> torch.Tensor:
            matrix = updates[number][0].new_empty(own[number].global_shape)
            for part, values in received:
                spec = specs[part.rank][number]
                paste(values.view(spec.shape), spec, matrix)
            return matrix.view(-1)

        def results_of(updates: Sequence[_Update]) -> _Results:
            yield from ()
            return [_orthogonalized(each, flat.tensor_shape(index), flat.group) for each, flat, index in updates]

        def part_of(result: torch.Tensor, part: MatrixPart) -> torch.Tensor:
            return cut(result.view(own[part.number].global_shape), specs[part.rank][part.number]).reshape(-1)

        directions = yield from _by_owners(sharing, tp, numbered, "muon.parts", fill, whole, results_of, part_of)
        by_number = {part.number: each for part, each in zip(sharing.sent, directions, strict=True)}
        return [by_number[number] for number in range(len(updates))]

    def _sharing(
        self,
        key: Hashable,
        holders: Callable[[], Sequence[Sequence[HeldPart]]],
        numbered: Sequence[tuple[RangeViews, int]],
        comm: Communicator,
        loads: Loads,
    ) -> Sharing:
        shapes = tuple(flat.tensor_shape(index) for flat, index in numbered)
        before = loads.get(comm, (0,) * comm.size)
        found = self._sharings.get((key, shapes, before))
        if found is None:
            found = share_out(holders(), shapes, before, comm.rank, numbered[0][0].group["ns_steps"])
            self._sharings[key, shapes, before] = found
        loads[comm] = found.loads
        return found


def _by_owners(
    sharing: Sharing,
    comm: Communicator,
    numbered: Sequence[tuple[RangeViews, int]],
    label: str,
    fill: Callable[[Sequence[torch.Tensor]], None],
    whole: Callable[[int, Sequence[_Received]], torch.Tensor],
    results_of: Callable[[Sequence[_Update]], _Results],
    part_of: Callable[[torch.Tensor, MatrixPart], torch.Tensor],
) -> _Results:
    """Matrices go to their owners, results come back.

    Args:
        fill: writes the update of each part of ``sharing.sent``.
        whole: puts a matrix together, of the parts that were received. Shape: [numel].
        results_of: of the matrices of this rank.
        part_of: a rank's part of a result.

    Returns: the result of each part of ``sharing.sent``.
    """
    flat = numbered[0][0]
    there, back, sizes = sharing.sent_splits, sharing.received_splits, _sizes(sharing.sent)
    parts = torch.empty(sum(there), dtype=torch.float32, device=flat.device)
    fill(parts.split(sizes))
    received = yield from _exchanged(comm, parts, back, there, f"{label}.updates")
    by_number: dict[int, list[_Received]] = {number: [] for number in sharing.own}
    for part, values in zip(sharing.received, received.split(_sizes(sharing.received)), strict=True):
        by_number[part.number].append((part, values))
    updates = [(whole(number, each), *numbered[number]) for number, each in by_number.items()]
    del parts, received, by_number
    results = dict(zip(sharing.own, (yield from results_of(updates)), strict=True))
    del updates

    dtype = compute_dtype(flat.group["ns_method"], flat.device, flat.weight)
    received = torch.empty(sum(back), dtype=dtype, device=flat.device)
    if sharing.received:
        torch.cat([part_of(results[part.number], part) for part in sharing.received], out=received)
    del results
    parts = yield from _exchanged(comm, received, there, back, f"{label}.results")
    directions: Sequence[torch.Tensor] = parts.split(sizes)
    return directions


def _exchanged(
    comm: Communicator, source: torch.Tensor, out_splits: Sequence[int], source_splits: Sequence[int], label: str
) -> Generator[None, None, torch.Tensor]:
    out = source.new_empty(sum(out_splits))
    work = comm.all_to_all(out, source, out_splits=out_splits, source_splits=source_splits, label=label)
    yield
    work.drain()
    return out


def _is_split(spec: ParameterSpec) -> bool:
    """False: the part is a stack of whole matrices."""
    return len(spec.global_shape) != 3 or spec.shape[1:] != spec.global_shape[1:]


def _as_ranges(local: Sequence[Sequence[Sequence[int]]]) -> tuple[Ranges, ...]:
    return tuple(tuple((start, stop) for start, stop in dim) for dim in local)


_Update = tuple[torch.Tensor, RangeViews, int]  # of a matrix [numel]; the range and the index of its parameter


_STOPS = 2  # of ``_by_owners``, without those of ``results_of``
_Received = tuple[MatrixPart, torch.Tensor]  # and its values [numel]
_Results = Generator[None, None, Sequence[torch.Tensor]]


def _part_of(flat: RangeViews, index: int) -> ParameterPart | None:
    return next((part for part in flat.parts if part.parameter == index), None)


def _as_matrices(shape: torch.Size) -> tuple[int, int, int]:
    """A parameter as (stack, rows, columns)."""
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], shape[1:].numel()


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
