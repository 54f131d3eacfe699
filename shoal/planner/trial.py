"""A candidate's step from a dry run of the engine: what it takes, and how far the run may be off.

A pipeline of more than two stages, the outermost axis, is run with two, which have as many blocks each. Each further
stage adds a micro-batch's time to the bubble, and one micro-batch more in flight to the first stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from shoal.engine.log import quiet
from shoal.errors import ShoalError
from shoal.planner.closed_forms import USABLE, Guess, in_flight, waiting
from shoal.planner.dry_model import dry_run_model
from shoal.planner.facts import ModelFacts, keep_blocks
from shoal.planner.model_of import attend_by_ranks
from shoal.planner.space import Candidate, PlanRequest
from shoal.simulation.times import COMMUNICATION, COMPUTE, STAGES

_MOST_STAGES = 2  # of a pipeline that is run dry

# By how much a figure may be off: lower and upper factor. Source: see docs/how-to/plan.md, "How exact it is".
INTERVALS = {"seconds": (0.88, 1.53), "memory": (0.97, 1.09)}


@dataclass(frozen=True)
class Trial:
    """A dry run of a candidate. Times are seconds of a step, sizes bytes of the rank that has most.

    Attributes: ``memory``: by kind, at the peak. ``received``: by collective; ``links``: by link. ``exposed``: waiting
    for communication, ``bubble``: for other pipeline stages; of the stage that computes longest. ``error``: why it did
    not run.
    """

    candidate: Candidate
    config: dict[str, Any]
    guess: Guess
    seconds: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0
    memory: dict[str, int] | None = None
    received: dict[str, int] | None = None
    links: dict[str, int] | None = None
    error: str = ""

    @property
    def nbytes(self) -> int:
        """Allocated at the peak."""
        return sum((self.memory or {}).values())

    def fits(self, request: PlanRequest) -> bool:
        """True if it ran, and within the device's memory."""
        capacity = request.machine.gpu_nbytes
        return not self.error and (capacity is None or self.nbytes <= USABLE * capacity)

    def as_dict(self, request: PlanRequest, facts: ModelFacts, price: float | None) -> dict[str, Any]:
        """For programs: figures with their intervals."""
        made: dict[str, Any] = {"name": str(self.candidate), **asdict(self.candidate), "config": self.config}
        if self.error:
            return {**made, "error": self.error}
        tokens = request.global_batch * request.sequence
        low, high = INTERVALS["seconds"]
        seconds = self.seconds
        rate = tokens / seconds / request.num_ranks
        peak = facts.flops_per_token / request.machine.peak_flops
        made |= {
            "seconds": seconds,
            "seconds_interval": [low * seconds, high * seconds],
            "tokens_per_second_per_gpu": rate,
            "tokens_per_second_per_gpu_interval": [rate / high, rate / low],
            "mfu": rate * peak,
            "mfu_interval": [rate * peak / high, rate * peak / low],
            "compute_seconds": self.compute,
            "exposed_communication_seconds": self.exposed,
            "bubble_seconds": self.bubble,
            "bubble": self.bubble / seconds,
            "memory": self.memory,
            "allocated": self.nbytes,
            "allocated_interval": [factor * self.nbytes for factor in INTERVALS["memory"]],
            "capacity": request.machine.gpu_nbytes,
            "fits": self.fits(request),
            "received": self.received,
            "links": self.links,
            "closed_form": {"seconds": self.guess.seconds, "memory": self.guess.memory},
        }
        if price is not None:
            made["cost_per_billion_tokens"] = 1e9 / rate / 3600 * price
        return made


def run_trial(
    candidate: Candidate,
    guess: Guess,
    build: Callable[[], nn.Module],
    request: PlanRequest,
    facts: ModelFacts,
    config: dict[str, Any] | None = None,
) -> Trial:
    """Run a candidate dry. What the engine refuses is the trial's ``error``.

    Args:
        config: what the candidate was read from; it runs with all its pipeline stages. None: the candidate's own.
    """
    # Fewer stages inside of a node would leave room for other ranks.
    is_outermost = next(axis for axis in candidate.mesh(request).order if axis != "ep") == "pp"
    num_stages = min(candidate.pp, _MOST_STAGES) if config is None and is_outermost else candidate.pp
    config = config or candidate.config(request, facts)
    fewer, num_ranks = config, request.num_ranks // candidate.pp * num_stages
    if candidate.pp > num_stages:
        fewer = {**config, "parallel": {**config["parallel"], "pp": num_stages}}

    def made() -> nn.Module:
        model = build()
        if candidate.pp > num_stages:
            keep_blocks(model, facts.num_blocks // candidate.pp * num_stages)
        if candidate.sp * candidate.cp > 1:
            attend_by_ranks(model)
        return model

    try:
        with quiet():
            step = dry_run_model(made, fewer, num_ranks, machine=request.machine, sequence=request.sequence)
    except ShoalError as error:
        return Trial(candidate, config, guess, error=str(error).splitlines()[0])
    num_micro = candidate.num_micro(request)
    first, busiest = step.stages[0], max(step.stages, key=lambda stage: stage.by_kind[COMPUTE])
    further = (candidate.pp - num_stages) / candidate.virtual
    added = further * waiting(candidate) * (first.by_kind[COMPUTE] + first.by_kind[COMMUNICATION]) / num_micro
    memories = [dict(stage.memory.by_kind) for stage in step.stages]
    saved = facts.block.saved if candidate.recompute == "none" else facts.boundary
    scale = candidate.micro / (candidate.tp * candidate.sp * candidate.cp)
    for at, outside in ((0, 0), (-1, facts.outer.saved * (candidate.schedule == "zb_h1"))) if further else ():
        several, two = (
            in_flight(each, num_micro, is_last=at == -1) for each in (candidate, replace(candidate, pp=num_stages))
        )
        more = (several - two) * scale * (saved * facts.num_blocks // candidate.pp + outside)
        memories[at]["activation"] = memories[at].get("activation", 0) + int(more)
    return Trial(
        candidate,
        config,
        guess,
        seconds=step.seconds + added,
        compute=busiest.by_kind[COMPUTE],
        exposed=busiest.by_kind[COMMUNICATION],
        bubble=busiest.by_kind[STAGES] + added,
        memory=max(memories, key=lambda kinds: sum(kinds.values())),
        received=step.received,
        links=step.links,
    )
