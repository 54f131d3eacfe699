"""Which experts of a layer a rank holds.

    ep = 2, 8 experts      rank 0: 0 1 2 3      rank 1: 4 5 6 7

A module that holds parameters of experts has an attribute ``experts_held``, by which the engine finds it, learns which
part of the layer its parameters are, and gives it the ranks that hold the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from shoal.comm import autograd
from shoal.comm.protocol import Communicator
from shoal.device import is_fake, read_vector
from shoal.errors import ConfigError, UsageError
from shoal.parallel.expert.copies import ExpertCopies
from shoal.parallel.expert.load import ExpertLoad
from shoal.parallel.expert.router_check import RouterCheck
from shoal.parallel.expert.usage import ExpertUsage
from shoal.parallel.tensor.region import TensorRegion
from shoal.streams import is_accelerator

Form = Literal["stacked", "listed"]


@dataclass(frozen=True)
class SplitDim:
    """The dim of a stacked parameter that is split where each expert is split over tensor-parallel ranks.

    Args:
        fused: matrices side by side in it (gate and up), each of which is split.
        is_interleaved: their elements alternate.
    """

    dim: int
    fused: int = 1
    is_interleaved: bool = False


@dataclass
class ExpertsHeld:
    """The experts of one layer that this rank holds, and the ranks that hold the others.

    Args:
        num_experts: of the whole layer.
        ep_size: the ranks among which they are divided.
        form: ``stacked``: dim 0 of each parameter is the experts (``[num_local * rows, ...]``); ``listed``: the module
            is a list of the local experts, each a module.
        comm: the ranks of expert parallelism, in order; None: before the engine has set them, or one rank has all.
        ids: the experts that this rank holds, in the order of its parameters.
        same_tokens: the tensor-parallel ranks that hold the same tokens and other experts; None: each rank has its own.
        owners: by expert, the coordinate along ``comm`` of the rank that holds it.
        hierarchy: two axes that ``comm`` is the product of: the ranks of a node, and those of one coordinate on the
            nodes. Rows are then sent in two steps; see ``hierarchical``.
        load: counts this rank's tokens by expert; None: nothing asks for them.
        router_check: whether the weights of the layer's router were finite.
        copies: the experts that every rank has a copy of; None: there are none.
        split_dims: of stacked experts, by parameter, the dim that expert tensor parallelism splits.
        wants_split: the layer was built for experts that are split over the tensor-parallel ranks.
        tp: the ranks that hold other parts of each stacked expert; None: experts are whole, or split their own layers.
        region: the tensor-parallel layers around; None: there are none.
        etp: the ranks over which each expert of this model is split; None: experts are whole.
        is_checked: a router's choices were found to be among the layer's experts.
        rows: of stacked experts, the elements of dim 0 that each has.
        usage: where experts are gathered only if they are used; None: all are.
        compute_name: of stacked experts, the module inside theirs whose forward computes rows; "": theirs itself; None:
            no module's does.
    """

    num_experts: int
    ep_size: int = 1
    form: Form = "stacked"
    comm: Communicator | None = None
    ids: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    same_tokens: Communicator | None = None
    hierarchy: tuple[Communicator, Communicator] | None = None
    load: ExpertLoad | None = None
    router_check: RouterCheck = field(default_factory=RouterCheck)
    copies: ExpertCopies | None = None
    split_dims: Mapping[str, SplitDim] = field(default_factory=dict)
    wants_split: bool = False
    tp: Communicator | None = None
    region: TensorRegion | None = None
    etp: Communicator | None = None
    is_checked: bool = False
    rows: int = 1
    usage: ExpertUsage | None = None
    compute_name: str | None = None

    def __post_init__(self) -> None:
        self.divide_among(self.ep_size)
        self.set_ranks(None)

    def divide_among(self, ep_size: int) -> None:
        """Change the number of ranks. Raises: ConfigError: it does not divide the experts, or is not a number."""
        self.ep_size = ep_size
        for what, number in (("experts of a layer", self.num_experts), ("expert-parallel ranks", ep_size)):
            if not isinstance(number, int) or number < 1:
                raise ConfigError(
                    f"the number of {what} is {number!r}.",
                    do="give a whole number from 1; of a list with the number of each layer, give each layer its own.",
                    code="expert-parallel-size",
                )
        if self.num_experts % self.ep_size:
            fits = [size for size in range(1, self.num_experts + 1) if self.num_experts % size == 0]
            raise ConfigError(
                f"{self.num_experts} experts cannot be divided among {self.ep_size} expert-parallel ranks.",
                do=f"use an expert-parallel size of {', '.join(map(str, fits))}, or another number of experts.",
                code="expert-parallel-size",
            )

    @property
    def num_local(self) -> int:
        """Experts that each rank holds."""
        return self.num_experts // self.ep_size

    def set_ranks(self, comm: Communicator | None) -> None:
        """Divide the experts among the ranks of ``comm``: neighbours of equal number."""
        rank = 0 if comm is None else comm.rank
        self.comm = comm
        self.ids = tuple(range(rank * self.num_local, (rank + 1) * self.num_local))
        self.owners = tuple(expert // self.num_local for expert in range(self.num_experts))

    def check_index(self, index: Tensor, label: str) -> None:
        """Check a router's choices: the first ones, and those on a CPU always. ``route`` checks what it reads.

        Args:
            index: the experts of each token; -1: none.

        Raises: UsageError: the layer has no such expert.
        Order: the first call blocks the host.
        """
        is_known = self.is_checked and is_accelerator(index.device)
        if is_known or not index.numel() or index.is_meta or is_fake(index):
            return
        self.is_checked = True
        low, high = (int(value) for value in read_vector(torch.stack(index.aminmax()), when_fake=0.0))
        if low < -1 or high >= self.num_experts:
            raise UsageError(
                f"the router chose expert {high if low >= -1 else low}, and the layer has experts 0 to"
                f" {self.num_experts - 1}.",
                where=label,
                do="give the router as many outputs as the layer has experts; -1 is a token without an expert.",
                code="expert-index",
            )

    def using(self, counts: Sequence[Sequence[int]], rows: Tensor) -> AbstractContextManager[None]:
        """Inside the block the experts run, on several parts of the rows one after the other.

        Args:
            counts: of each part, this rank's rows of each expert.

        Communicates: as ``ExpertUsage.of``, unless such a block is around.
        """
        if self.usage is None or self.usage.is_running:
            return nullcontext()
        return self.usage.of([sum(of_expert) for of_expert in zip(*counts, strict=True)], rows.device)

    def enter(self, rows: Tensor) -> Tensor:
        """The rows before the first matrices of stacked experts. Communicates: in backward, an all-reduce of them."""
        return rows if self.tp is None else autograd.copy(rows, self.tp, label="experts in")

    def leave(self, rows: Tensor) -> Tensor:
        """The rows after the second matrices, before the bias. Communicates: an all-reduce of them."""
        return rows if self.tp is None else autograd.all_reduce(rows, self.tp, label="experts out")

    @property
    def has_split_sequence(self) -> bool:
        """True if the tensor-parallel ranks hold different tokens of one sequence."""
        return self.region is not None and self.region.splits_sequence

    def of_all_tokens(self, rows: Tensor) -> Tensor:
        """One row for each token of the whole sequence, for a statistic; every rank computes the same from them.

        Communicates: where the tensor-parallel ranks split the sequence, an all-gather.
        """
        if self.region is None or not self.region.splits_sequence:
            return rows
        return autograd.gather(rows, self.region.comm, label="router's rows of all tokens")

    @property
    def gathers_tokens(self) -> Communicator | None:
        """The ranks whose tokens each of them needs: each has a part of every expert."""
        return self.etp if self.has_split_sequence else None

    def place(self, placement: Sequence[Sequence[int]]) -> None:
        """Say where the experts are now.

        Args:
            placement: by rank, the experts that it holds, in the order of its parameters.
        """
        self.ids = tuple(placement[0 if self.comm is None else self.comm.rank])
        owner = {expert: rank for rank, ids in enumerate(placement) for expert in ids}
        self.owners = tuple(owner[expert] for expert in range(self.num_experts))


def modules_with_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertsHeld]]:
    """The modules that hold parameters of experts, by name."""
    for name, module in model.named_modules():
        held = getattr(module, "experts_held", None)
        if isinstance(held, ExpertsHeld):
            yield name, module, held


def first_bad_router(model: nn.Module) -> str | None:
    """The name of the first experts, in the model's order, whose router has given weights that are not finite.

    Order: blocks the host.
    """
    bad = [name for name, _, held in modules_with_experts(model) if held.router_check.is_bad()]
    return bad[0] if bad else None


def global_names(model: nn.Module) -> Callable[[str], str]:
    """What gives a parameter or buffer of this rank's model its name in the whole model.

    They differ for experts in a list, which each rank numbers from 0.
    """
    lists = {
        name: held.ids for name, _, held in modules_with_experts(model) if held.form == "listed" and held.ep_size > 1
    }
    if not lists:
        return str
    pattern = re.compile(rf"({'|'.join(map(re.escape, lists))})\.(\d+)(?=\.)")

    def rename(name: str) -> str:
        found = pattern.match(name)
        if found is None:
            return name
        return f"{found[1]}.{lists[found[1]][int(found[2])]}{name[found.end() :]}"

    return rename
