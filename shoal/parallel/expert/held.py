"""Which experts of a layer a rank holds, and what is known of them while they run.

    ep = 2, 8 experts      rank 0: 0 1 2 3      rank 1: 4 5 6 7

A module that holds parameters of experts has an attribute ``experts_held``, by which the engine finds it, learns which
part of the layer its parameters are, and gives it the ranks that hold the others. Experts have one of two forms: they
are *stacked* (dim 0 of each parameter is the experts), or *listed* (the module is a list of the local experts).
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from shoal.comm import autograd
from shoal.comm.formats import WireFormat
from shoal.comm.protocol import Communicator
from shoal.device import is_fake, read_vector
from shoal.errors import ConfigError, UsageError
from shoal.parallel.expert.bias import ExpertLoad
from shoal.parallel.expert.rebalance import ExpertCopies, ExpertsByRank
from shoal.parallel.host_reads import Tickets
from shoal.parallel.products import AS_THEY_ARE, LayerProducts
from shoal.parallel.selective import unseen_by_policies
from shoal.parallel.tensor.region import TensorRegion
from shoal.streams import is_accelerator


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


@dataclass(frozen=True)
class Stack:
    """How the parameters of stacked experts are laid out, ``[num_local * rows, ...]``, and what computes with them.

    Args:
        split_dims: by parameter, the dim that expert tensor parallelism splits.
        compute_name: the module inside theirs whose forward computes rows; "": theirs itself; None: no module's does.
        rows: the elements of dim 0 that each expert has.
    """

    split_dims: Mapping[str, SplitDim] = field(default_factory=dict)
    compute_name: str | None = None
    rows: int = 1


@dataclass(frozen=True)
class TensorRanks:
    """The tensor-parallel ranks around a layer of experts.

    Args:
        same: those that hold the same tokens and other experts; None: each rank has its own tokens.
        tokens: by expert-parallel rank a number, equal for those of the same tokens.
        etp: those over which each expert of this model is split; None: experts are whole.
        region: the tensor-parallel layers around; None: there are none.
    """

    same: Communicator | None = None
    tokens: tuple[int, ...] = ()
    etp: Communicator | None = None
    region: TensorRegion | None = None

    @property
    def splits_sequence(self) -> bool:
        """True if the tensor-parallel ranks hold different tokens of one sequence."""
        return self.region is not None and self.region.splits_sequence

    @property
    def gathers_tokens(self) -> Communicator | None:
        """The ranks whose tokens each of them needs: each has a part of every expert."""
        return self.etp if self.splits_sequence else None

    def of_all_tokens(self, rows: Tensor) -> Tensor:
        """One row for each token of the whole sequence, for a statistic; every rank computes the same from them.

        Communicates: where the tensor-parallel ranks split the sequence, an all-gather.
        """
        if self.region is None or not self.region.splits_sequence:
            return rows
        # Not traced: a check of the loss finds this gather in autograd's graph.
        return autograd.gather(rows, self.region.comm, label="router's rows of all tokens")


class RouterCheck:
    """Checks what a layer's router returns: that its choices are experts of the layer, and its weights are finite."""

    def __init__(self) -> None:
        self.has_checked = False
        self._sum: Tensor | None = None

    @unseen_by_policies()  # a recomputation does not repeat the first check
    def check_index(self, index: Tensor, num_experts: int, label: str) -> None:
        """Check a router's choices: the first ones, and those on a CPU always. ``route`` checks what it reads.

        Args:
            index: the experts of each token; -1: none.

        Raises: UsageError: the layer has no such expert.
        Order: the first call blocks the host.
        """
        is_known = self.has_checked and is_accelerator(index.device)
        if is_known or not index.numel() or index.is_meta or is_fake(index):
            return
        self.has_checked = True
        low, high = (int(value) for value in read_vector(torch.stack(index.aminmax()), when_fake=0.0))
        if low < -1 or high >= num_experts:
            raise UsageError(
                f"the router chose expert {high if low >= -1 else low}, and the layer has experts 0 to"
                f" {num_experts - 1}.",
                where=label,
                do="give the router as many outputs as the layer has experts; -1 is a token without an expert.",
                code="expert-index",
            )

    def note(self, weights: Tensor) -> None:
        """Add up weights, on the device: one sum and one addition a forward, and no synchronization."""
        total = weights.detach().sum(dtype=torch.float32)
        before = self._sum
        self._sum = total if before is None or before.device != total.device else before + total

    def is_bad(self) -> bool:
        """True if some weight was not finite since the last call. Order: blocks the host."""
        total, self._sum = self._sum, None
        return total is not None and not bool(total.isfinite())


class ExpertUsage:
    """The experts of one layer that got a row, on any of the ranks that gather their parameters together.

    The parameters of the others need not be gathered.

    Args:
        comm: the ranks that hold shards of the same experts.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._used: tuple[bool, ...] | None = None

    @property
    def is_running(self) -> bool:
        """True if the experts run."""
        return self._used is not None

    @contextmanager
    def of(self, counts: Sequence[int]) -> Iterator[None]:
        """Run the experts inside the block.

        Args:
            counts: this rank's rows of each expert.

        Communicates: along ``comm``, an exchange of 8 bytes an expert, between hosts.
        """
        of_all = self._comm.exchange_on_host(counts, label="used experts")
        before, self._used = self._used, tuple(any(of_expert) for of_expert in zip(*of_all, strict=True))
        try:
            yield
        finally:
            self._used = before

    def used(self, place: int | None = None) -> tuple[bool, ...] | None:
        """For each expert, True if the forward that runs uses it. None: the experts do not run.

        Args:
            place: of one expert, which is asked for alone; None: all of them.
        """
        if self._used is None or place is None:
            return self._used
        return (self._used[place],)


@dataclass
class ExpertsHeld:
    """The experts of one layer that this rank holds, and the ranks that hold the others.

    Args:
        num_experts: of the whole layer.
        ep_size: the ranks among which they are divided.
        stack: the layout of stacked experts; None: they are listed.
        comm: the ranks of expert parallelism, in order; None: before the engine has set them, or one rank has all.
        ids: the experts that this rank holds, in the order of its parameters.
        owners: by expert, the coordinate along ``comm`` of the rank that holds it.
        hierarchy: two axes that ``comm`` is the product of: the ranks of a node, and those of one coordinate on the
            nodes. Rows are then sent in two steps; see ``dispatch.TwoStepRows``.
        wire: the format in which rows are sent along ``comm``; None: as they are.
        products: how the matrices of stacked experts are multiplied.
        tensor: the tensor-parallel ranks.
        router_check: of the layer's router.
        load: counts this rank's tokens by expert; None: nothing asks for them.
        usage: where experts are gathered only if they are used; None: all are.
        copies: the experts that every rank has a copy of; None: there are none.
        traced: the experts as compiled code finds them; None: they break its graph.
    """

    num_experts: int
    ep_size: int = 1
    stack: Stack | None = Stack()
    comm: Communicator | None = None
    ids: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    hierarchy: tuple[Communicator, Communicator] | None = None
    wire: WireFormat | None = None
    products: LayerProducts = AS_THEY_ARE
    tensor: TensorRanks = TensorRanks()
    router_check: RouterCheck = field(default_factory=RouterCheck)
    load: ExpertLoad | None = None
    usage: ExpertUsage | None = None
    copies: ExpertCopies | None = None
    traced: TracedExperts | None = None

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
    def form(self) -> Literal["stacked", "listed"]:
        return "listed" if self.stack is None else "stacked"

    @property
    def num_local(self) -> int:
        """Experts that each rank holds."""
        return self.num_experts // self.ep_size

    def set_ranks(self, comm: Communicator | None) -> None:
        """Divide the experts among the ranks of ``comm``: neighbours of equal number."""
        self.comm = comm
        size = self.num_local
        self.place([range(first, first + size) for first in range(0, self.num_experts, size)])

    def place(self, placement: ExpertsByRank | Sequence[Sequence[int]]) -> None:
        """Say where the experts are now.

        Args:
            placement: by rank, the experts that it holds, in the order of its parameters.
        """
        self.ids = tuple(placement[0 if self.comm is None else self.comm.rank])
        owner = {expert: rank for rank, ids in enumerate(placement) for expert in ids}
        self.owners = tuple(owner[expert] for expert in range(self.num_experts))

    def using(self, counts: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
        """Inside the block the experts run, on several parts of the rows one after the other.

        Args:
            counts: of each part, this rank's rows of each expert.

        Communicates: as ``ExpertUsage.of``, unless such a block is around.
        """
        if self.usage is None or self.usage.is_running:
            return nullcontext()
        return self.usage.of([sum(of_expert) for of_expert in zip(*counts, strict=True)])

    def enter(self, rows: Tensor) -> Tensor:
        """The rows before the first matrices of stacked experts. Communicates: in backward, an all-reduce of them."""
        return rows if self.tensor.etp is None else autograd.copy(rows, self.tensor.etp, label="experts in")

    def leave(self, rows: Tensor) -> Tensor:
        """The rows after the second matrices, before the bias. Communicates: an all-reduce of them."""
        return rows if self.tensor.etp is None else autograd.all_reduce(rows, self.tensor.etp, label="experts out")


class TracedExperts:
    """A layer's experts for compiled code.

    A compiled graph takes ``number`` as an input and looks the experts up when it runs: one graph serves equal blocks,
    and ranks that are threads.

    Args:
        module: that holds their parameters.
        compute: the module whose forward computes rows.
    """

    def __init__(self, held: ExpertsHeld, module: nn.Module, compute: nn.Module) -> None:
        self.held, self.module, self.compute = held, module, compute
        number = next(_numbers)
        self.number = torch.tensor(number, dtype=torch.int64, device="cpu")
        _traced[number] = self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return type(None), ()  # the number is this model's; a copy has none

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]


_numbers = itertools.count()
_traced: weakref.WeakValueDictionary[int, TracedExperts] = weakref.WeakValueDictionary()


def traced_experts(number: Tensor) -> TracedExperts:
    return _traced[int(number)]


def let_trace(model: nn.Module, units: Sequence[str]) -> None:
    """Let compiled code run a model's experts as operators of its graph.

    Args:
        units: names of the modules whose hooks gather parameters. Experts that are such modules, or contain them, break
            the graph: an operator's parameters are there before it runs.
    """
    for name, module, held in modules_with_experts(model):
        around = model.get_submodule(name.rpartition(".")[0])
        inner = None if held.stack is None else held.stack.compute_name
        if getattr(around, "deepspeed_experts", None) is module:
            compute, name = around, name.rpartition(".")[0]
        else:
            compute = module if inner is None else module.get_submodule(inner)
        is_apart = any(unit == name or unit.startswith(f"{name}.") for unit in units)
        held.traced = None if is_apart else TracedExperts(held, module, compute)
        Tickets.are_used = Tickets.are_used or held.traced is not None


class ListedExperts(nn.ModuleList):
    """Experts that are modules, of which this rank holds some, in the order of their numbers."""

    experts_held: ExpertsHeld

    def forward(self, rows: Tensor, counts: Sequence[int], dim: int = 0) -> Tensor:
        """Each expert's output for its rows; of a tuple the first.

        An expert without rows is called too: all ranks gather and reduce at the same places, and its gradients are
        zeros, not None.

        Args:
            rows: sorted by expert along ``dim``.
            counts: the rows of each local expert.
        """
        parts = rows.split(list(counts), dim)
        with self.experts_held.using([counts]):
            outputs = [expert(part) for expert, part in zip(self, parts, strict=True)]
        return torch.cat([each[0] if isinstance(each, tuple) else each for each in outputs], dim)


def modules_with_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertsHeld]]:
    """The modules that hold parameters of experts, by name."""
    for name, module in model.named_modules():
        held = getattr(module, "experts_held", None)
        if isinstance(held, ExpertsHeld):
            yield name, module, held


def built_for(model: nn.Module) -> tuple[int, bool]:
    """What the model's layers with experts were built for.

    Returns: the expert-parallel ranks, 0: they leave it open; True if a layer (``layer.MoE``) was built for experts
        that are split over the tensor-parallel ranks.
    """
    ep_size = max((held.ep_size for _, _, held in modules_with_experts(model) if held.ep_size > 1), default=0)
    return ep_size, any(getattr(module, "enable_expert_tensor_parallelism", False) for module in model.modules())


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
        match = pattern.match(name)
        if match is None:
            return name
        return f"{match[1]}.{lists[match[1]][int(match[2])]}{name[match.end() :]}"

    return rename


@dataclass(frozen=True)
class ExpertsIfUsed:
    """Experts whose parameters can be gathered if a token uses them.

    Args:
        module: the name of the module whose forward needs them.
        place: of one expert of a list; None: they are stacked.
    """

    held: ExpertsHeld
    module: str
    place: int | None = None

    def start(self, comm: Communicator) -> None:
        """Forwards tell which experts they use, of which the ranks along ``comm`` hold shards."""
        self.held.usage = self.held.usage or ExpertUsage(comm)

    def used(self) -> tuple[bool, ...] | None:
        """For each of them, True if the forward that runs uses it. None: they do not run."""
        return None if self.held.usage is None else self.held.usage.used(self.place)

    def stop(self) -> None:
        self.held.usage = None


def experts_if_used(model: nn.Module) -> dict[str, ExpertsIfUsed]:
    """By name, each expert of a list, and all experts of a stack, that need no parameters for an input without rows.

    Those that compute parameters from others before their forward (weight norm) need them.
    """
    experts: dict[str, ExpertsIfUsed] = {}
    for name, module, held in modules_with_experts(model):
        if held.stack is None and isinstance(module, nn.ModuleList):
            for place, expert in enumerate(module):
                if _needs_no_parameters(expert):
                    experts[f"{name}.{place}"] = ExpertsIfUsed(held, f"{name}.{place}", place)
        elif held.stack and held.stack.compute_name is not None and _needs_no_parameters(module):
            num_rows = held.num_local * held.stack.rows
            if all(parameter.shape[:1] == (num_rows,) for parameter in module.parameters()):
                experts[name] = ExpertsIfUsed(held, ".".join(filter(None, (name, held.stack.compute_name))))
    return experts


def _needs_no_parameters(experts: nn.Module) -> bool:
    return not any(is_parametrized(part) or part._forward_pre_hooks for part in experts.modules())
