"""Time and memory of a configuration from formulas, in microseconds: they rank and prune; a dry run decides.

    compute        a block's seconds on one device x rows / (tp sp cp); recomputation adds its forward
    tensor         per block and micro-batch: 6 all-gathers and 4 reduce-scatters of the rows (2 and 2 of them forward)
    sequence       per block and micro-batch: 8 all-to-alls (Ulysses); cp: keys and values, cp - 1 times, thrice
    experts        per block and micro-batch: 4 all-to-alls of the rows that the router sends
    data           stage 1: once a step; 2: gradients per micro-batch; 3: parameters twice, too, of blocks that stay
                   gathered once; behind the compute
    pipeline       (pp - 1) / virtual micro-batches are waited for, with ZB-H1 a third of that; a message to and from
                   each further stage once, and with one stage on a rank 2 (pp - 1) / pp messages per micro-batch
    recomputation  by budget: as many blocks as must, so that what the others save fits; of each few of them one may
                   have its activations on the host, which are copied while the others compute
    memory         ``GroupMemory``'s bytes per element; rows in flight x what a block saves; logits; staging

Source: ZeRO (arXiv:1910.02054), table 1; Korthikanti et al. (arXiv:2205.05198); Narayanan et al. (arXiv:2104.04473).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shoal.mesh import Mesh
from shoal.planner.facts import ModelFacts
from shoal.planner.space import Candidate, PlanRequest
from shoal.simulation.collective_times import collective_seconds
from shoal.text import parse_bytes

_PARAMETER, _MAIN = 2, 4  # bytes of an element: bf16 and fp32
_STATES = 8  # Adam's two
_UPDATE = 7 * _MAIN  # bytes that AdamW reads and writes per element
_ACCUMULATE = 2 * _MAIN + _PARAMETER  # that adding a micro-batch's gradient does
_MAX_WHOLE = 1_000_000_000  # elements of a rank's stages that ZeRO-3 keeps gathered through a step of a pipeline
_FASTER = 0.99  # of the time, from which on a change counts
USABLE = 0.92  # of the device's memory, allocated: the rest is what the allocator, CUDA and NCCL take


@dataclass(frozen=True)
class Guess:
    """Of one step. ``memory``: bytes by kind, of the pipeline stage that needs most. ``compute``, ``exposed``,
    ``bubble``: seconds of the slowest stage, of which ``seconds`` consists with the optimizer's.
    """

    seconds: float
    compute: float
    exposed: float
    bubble: float
    memory: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.memory.values())


class ClosedForms:
    """The formulas for one request and model. Times of collectives are kept."""

    def __init__(self, request: PlanRequest, facts: ModelFacts) -> None:
        self.request, self.facts = request, facts
        self._ranks: dict[tuple[Mesh, str], tuple[int, ...]] = {}
        self._seconds: dict[tuple[str, int, Mesh, str], float] = {}

    def guess(self, one: Candidate) -> Guess:
        """What a candidate takes."""
        return _Formulas(one, self).guess()

    def within(self, one: Candidate, nbytes: float) -> Candidate | None:
        """A candidate with recomputation by budget, with the budget of a step of so many bytes; None: there is none.

        Activations are offloaded too where fewer blocks are recomputed then.
        """
        every = _Formulas(one, self).offload_every()
        possible = (
            self._within(replace(one, recompute="budget", budget="", every=each), nbytes) for each in {0, every}
        )
        return min((each for each in possible if each is not None), key=self._num_recomputed, default=None)

    def gathered(self, one: Candidate, nbytes: float) -> Candidate | None:
        """A candidate of stage 3 that keeps as many blocks gathered as a step of so many bytes lets it; None: none, or
        it would not be faster.
        """
        formulas = _Formulas(one, self)
        spare = int((nbytes - formulas.guess().nbytes) // (_PARAMETER * formulas.unit))
        number = min(spare, formulas.blocks - 1)
        if one.stage != 3 or one.pp > 1 or one.offload == "all" or number < 1:
            return None
        more = replace(one, gathered=number)
        return more if self.guess(more).seconds < _FASTER * self.guess(one).seconds else None

    def _within(self, one: Candidate, nbytes: float) -> Candidate | None:
        found = _Formulas(one, self).budget(nbytes)
        if found is None:
            return None
        return replace(one, budget=f"{found >> 20}MiB" if found >> 30 else f"{found >> 10}KiB")

    def _num_recomputed(self, one: Candidate) -> tuple[int, int]:
        return _Formulas(one, self).split()[1], one.every

    def collective(self, op: str, nbytes: int, mesh: Mesh, axis: str) -> float:
        """Seconds of a collective along an axis, of rank 0."""
        key = (op, nbytes, mesh, axis)
        if key not in self._seconds:
            if (mesh, axis) not in self._ranks:
                self._ranks[mesh, axis] = mesh.ranks_along(axis, 0)
            machine, ranks = self.request.machine, self._ranks[mesh, axis]
            self._seconds[key] = collective_seconds(op, nbytes, ranks, machine.gpus_per_node, machine.links)
        return self._seconds[key]


class _Formulas:
    def __init__(self, one: Candidate, forms: ClosedForms) -> None:
        request, facts = forms.request, forms.facts
        self.one, self.forms, self.facts = one, forms, facts
        self.node, self.mesh = request.machine, one.mesh(request)
        self.num_micro = one.num_micro(request)
        self.parts = one.tp * one.sp * one.cp
        self.blocks = facts.num_blocks // one.pp
        self.scale = one.micro / self.parts
        self.block_numel = facts.block.numel // one.tp
        self.expert_numel = facts.block.expert_numel // one.ep
        self.unit = self.block_numel + self.expert_numel
        self.shards = self.mesh.size("fsdp")
        self.saved, self.inputs = (int(self.scale * each) for each in (facts.block.saved, facts.boundary))
        self.kept, self.num_recomputed, self.offloaded = self.split()
        self.recomputed = self.num_recomputed / max(self.blocks, 1)

    def split(self) -> tuple[int, int, int]:
        """Blocks that are kept, recomputed and offloaded: by a budget as ``choose`` does, of equal blocks."""
        if self.one.recompute != "budget" or not self.one.budget:
            return (self.blocks, 0, 0) if self.one.recompute == "none" else (0, self.blocks, 0)
        budget = parse_bytes(self.one.budget) or 0
        splits = (self._of_kept(kept) for kept in range(self.blocks, -1, -1))
        return next((each for each in splits if self._device_nbytes(*each) <= budget), (0, self.blocks, 0))

    def _of_kept(self, kept: int) -> tuple[int, int, int]:
        left = self.blocks - kept
        offloaded = -(-left // self.one.every) if self.one.every else 0
        return kept, left - offloaded, offloaded

    def _device_nbytes(self, kept: int, recomputed: int, offloaded: int) -> int:
        """As ``device_nbytes`` of the engine."""
        whole = kept + bool(recomputed) + min(offloaded, 2)
        return whole * self.saved + recomputed * self.inputs

    def budget(self, nbytes: float) -> int | None:
        """The ``memory_budget`` of a step of so many bytes; None: too few to keep a block, or enough for all."""
        spare = nbytes - sum(self._memory().values()) + self.blocks * self.inputs
        every = self.blocks * self.saved
        for kept in range(self.blocks - 1, -1, -1) if spare < every else ():
            _, recomputed, offloaded = of = self._of_kept(kept)
            # The last blocks are kept, and freed before one is recomputed. By the engine's rule both count.
            nbytes_by_rule = self._device_nbytes(*of)
            is_within = nbytes_by_rule - self.saved * bool(recomputed) <= spare
            if is_within and nbytes_by_rule < every and (kept or offloaded):
                return nbytes_by_rule + (self.saved - self.inputs) // 2
        return None

    def offload_every(self) -> int:
        """Of how many blocks one may be offloaded, so that its copy takes no longer than their forward; 0: none can."""
        node, seconds = self.node, self.facts.block.forward * self.scale + self._layer_seconds() / 2
        rate = min(node.bus_bandwidth, node.host_bandwidth / node.gpus_per_node)
        room = node.host_nbytes / node.gpus_per_node / 2
        every = max(math.ceil(self.saved / rate / seconds), math.ceil(self.blocks * self.saved / room))
        return 0 if self.one.offload != "none" or node.is_cpu or every >= self.blocks else every

    def guess(self) -> Guess:
        one, num_micro, facts = self.one, self.num_micro, self.facts
        forward, backward = facts.block.forward * self.scale, facts.block.backward * self.scale
        tensor = self._layer_seconds()
        backward, tensor = backward + self.recomputed * forward, (1 + self.recomputed / 2) * tensor
        backward += (self.block_numel + self.expert_numel) * _ACCUMULATE / self.node.memory_bandwidth
        gather, reduce = self._data_seconds(self.block_numel, self.expert_numel)
        gather_outer, reduce_outer = self._data_seconds(facts.outer.numel // one.tp, 0)
        is_per_micro = one.stage == 3 and (one.pp == 1 or self.blocks * self.block_numel > _MAX_WHOLE)
        is_reduced_per_micro = is_per_micro or (one.stage == 2 and one.pp == 1)
        hidden_forward = gather if is_per_micro else 0.0
        hidden_backward = hidden_forward + (reduce if is_reduced_per_micro else 0.0)
        of_block = max(forward + tensor / 2, hidden_forward) + max(backward + tensor / 2, hidden_backward)
        saved = max(backward + tensor / 2, hidden_backward)
        saved -= max(backward + tensor / 2, hidden_backward - hidden_forward)
        of_block -= one.gathered / max(self.blocks, 1) * saved
        outer = (facts.outer.forward + facts.outer.backward) * self.scale
        steady = num_micro * (self.blocks * of_block + outer)
        compute = num_micro * (self.blocks * (forward + backward) + outer) + self._update_seconds()
        bubble = (one.pp - 1) / one.virtual * self.blocks * of_block * waiting(one)
        exposed = steady + self._update_seconds() - compute + gather_outer + reduce_outer
        exposed += self._message_seconds()
        if not is_per_micro:
            hidden = 0.0 if is_reduced_per_micro or one.pp > 1 else self.blocks * backward
            # Gathers after a step at stages 1 and 2 overlap the next forward: ``overlap_param_gather``.
            overlapped = 0.0 if one.stage == 0 or self.node.is_cpu else min(gather, forward)
            exposed += self.blocks * (gather - overlapped)
            exposed += max((0.0 if is_reduced_per_micro else self.blocks * reduce) - hidden, 0.0)
        return Guess(compute + exposed + bubble, compute, exposed, bubble, self._memory())

    def _layer_seconds(self) -> float:
        """Communication inside of a block's forward and backward, for one micro-batch."""
        one, rows = self.one, self.one.micro * self.facts.boundary
        seconds = 0.0
        if one.tp > 1:
            nbytes = rows // (one.sp * one.cp)
            seconds += 6 * self._time("all_gather", nbytes, "tp") + 4 * self._time("reduce_scatter", nbytes, "tp")
        if one.sp > 1:
            seconds += 8 * self._time("all_to_all", rows // self.parts, "sp")
        if one.cp > 1:
            keys = 2 * rows * self.facts.divisible["key-value heads"] // self.facts.divisible["heads"] // self.parts
            seconds += 3 * (one.cp - 1) * self._time("send", keys, "cp") / 2
        if one.ep > 1:
            seconds += 4 * self._time("all_to_all", 2 * rows // self.parts, "ep")
        return seconds

    def _message_seconds(self) -> float:
        """What messages between pipeline stages add to a step."""
        one = self.one
        if one.pp == 1:
            return 0.0
        # With several stages on a rank there is other work while a message is under way, but at the ends of the step.
        per_micro = 2 * (one.pp - 1) / one.pp if one.virtual == 1 else 0.0
        num = 2 * (one.pp * one.virtual - 1) + per_micro * self.num_micro
        return num * self._time("send", one.micro * self.facts.boundary // self.parts, "pp")

    def _data_seconds(self, dense: int, experts: int) -> tuple[float, float]:
        """To gather so many elements of parameters, and to reduce their gradients."""
        gather, reduce = 0.0, 0.0
        for numel, axis, shards in (
            (dense, "fsdp", self.shards),
            (experts, "expert_dp", max(self.shards // self.one.ep, 1)),
        ):
            if not numel:
                continue
            gather += self._time("all_gather", _PARAMETER * numel, axis)
            reduce += self._time("reduce_scatter", _PARAMETER * numel, axis)
            if self.mesh.dp_replicate > 1:
                reduce += self._time("all_reduce", _PARAMETER * numel // shards, "dp_replicate")
        return gather, reduce

    def _time(self, op: str, nbytes: int, axis: str) -> float:
        return self.forms.collective(op, int(nbytes), self.mesh, axis)

    def _owned(self) -> float:
        """Elements that this rank's optimizer updates."""
        outer = self.facts.outer.numel // self.one.tp
        experts = self.blocks * self.expert_numel / max(self.shards // self.one.ep, 1)
        return (self.blocks * self.block_numel + outer) / self.shards + experts

    def _update_seconds(self) -> float:
        nbytes = self._owned() * _UPDATE
        if self.one.offload == "none":
            return nbytes / self.node.memory_bandwidth
        return nbytes * self.node.gpus_per_node / self.node.host_bandwidth + self._owned() * 4 / self.node.bus_bandwidth

    def _memory(self) -> dict[str, int]:
        """Of the first stage or the last one, whichever needs more."""
        ends = [self._stage_memory(is_first, is_last) for is_first, is_last in self._ends()]
        return max(ends, key=lambda kinds: sum(kinds.values()))

    def _ends(self) -> tuple[tuple[bool, bool], ...]:
        return ((True, True),) if self.one.pp == 1 else ((True, False), (False, True))

    def _stage_memory(self, is_first: bool, is_last: bool) -> dict[str, int]:
        one, facts = self.one, self.facts
        outer = facts.outer.numel if is_first and is_last else max(facts.embedding_numel, facts.outer.numel // 2)
        outer //= one.tp
        dense, experts = self.blocks * self.block_numel + outer, self.blocks * self.expert_numel
        fewer = self.shards, max(self.shards // one.ep, 1)
        whole, sharded = dense + experts, dense // fewer[0] + experts // fewer[1]
        gradient = _MAIN if self.num_micro > 1 else _PARAMETER
        is_gradient_sharded = one.stage > 1
        is_state_here = one.offload == "none"
        kinds = {
            "parameter": 0 if one.offload == "all" else _PARAMETER * (sharded if one.stage == 3 else whole),
            "gradient": 0 if not is_state_here else gradient * (sharded if is_gradient_sharded else whole),
            "master": _MAIN * sharded * is_state_here,
            "optimizer state": _STATES * sharded * is_state_here,
        }
        unit = self.unit
        if one.stage == 3:
            kinds["gathered"] = _PARAMETER * (max(2 * unit, outer) + one.gathered * unit if self.blocks > 1 else unit)
        if is_gradient_sharded:
            kinds["buffers in flight"] = _PARAMETER * (2 * unit + outer)
        saved = (self.kept + min(self.offloaded, 2)) * self.saved + self.num_recomputed * self.inputs
        num_in_flight = in_flight(one, self.num_micro, is_last=not is_first)
        activation = saved * num_in_flight
        if is_last and one.schedule == "zb_h1":
            activation += (num_in_flight - 1) * facts.outer.saved * self.scale
        again = self.saved if one.recompute == "blocks" else 0
        kinds["activation"] = int(activation + again + (facts.peak * self.scale if is_last else 0))
        kinds["cuBLAS"] = self.node.workspace_nbytes
        return kinds


def in_flight(one: Candidate, num_micro: int, *, is_last: bool = False) -> float:
    """Micro-batches of which the first or last rank of a pipeline has activations, of all its stages together, at most.

    Those whose backward for weights is to come count: it needs as many bytes, of inputs and of gradients of outputs.
    """
    further = (one.pp - 1) / one.virtual
    most = one.pp + further if one.virtual > 1 else one.pp
    if one.schedule == "zb_h1":
        most = one.pp
    elif is_last:
        most = one.pp - further
    return min(most, float(num_micro)) if one.pp > 1 else 1.0


def waiting(one: Candidate) -> float:
    """The part of a micro-batch's time that a further pipeline stage adds to the bubble.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), table 2: of ZB-H1, forward and backward
    for inputs, less backward for weights, where these three take the same time.
    """
    return 1 / 3 if one.schedule == "zb_h1" and one.recompute == "none" else 1.0
