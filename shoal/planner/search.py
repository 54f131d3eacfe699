"""``shoal.plan``: formulas prune and rank all configurations, and the best of them are run dry."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from shoal.config import load
from shoal.config.parallel import INTERLEAVED
from shoal.config.ranks import mesh_of
from shoal.errors import UsageError
from shoal.planner.closed_forms import USABLE, ClosedForms, Guess
from shoal.planner.facts import ModelFacts, facts_of
from shoal.planner.model_of import as_builder
from shoal.planner.space import Candidate, PlanRequest, candidates, order_name, parse_filter, refused, with_savings
from shoal.planner.trial import Trial, run_trial
from shoal.simulation.machines import GpuNode, machine_of
from shoal.text import format_bytes

_FILLED = 0.97  # of the memory that can be used, that a budget fills by the formulas
_SURE = 0.85  # of a formula's seconds, that a dry run takes at least
_WORST = 2.0  # times the best formula's seconds: what is slower is not run dry
_LONG = 16_384  # tokens of a row from which on it is split over ranks without being asked

Progress = Callable[[str, int, int], None]  # what is done, how many of how many


@dataclass(frozen=True)
class ClusterPlan:
    """What was found.

    Attributes: ``trials``: what was run dry: those that fit first, the fastest first. ``rejected``: by reason, the
    number of candidates. ``ranked``: those that the formulas let fit, the fastest first. ``tightest``: the candidate
    that needs least memory, of those that were possible.
    """

    request: PlanRequest
    facts: ModelFacts
    trials: tuple[Trial, ...]
    ranked: tuple[tuple[Guess, Candidate], ...]
    rejected: Mapping[str, int]
    tightest: tuple[Guess, Candidate] | None
    advice: tuple[str, ...] = ()

    @property
    def best(self) -> Trial | None:
        """The fastest that fits; None: nothing does."""
        return next((trial for trial in self.trials if trial.fits(self.request)), None)


def plan(
    model: str | Callable[[], nn.Module],
    num_ranks: int,
    *,
    machine: str | Path | GpuNode = "h100",
    sequence: int,
    global_batch: int,
    config: Mapping[str, Any] | None = None,
    space: Mapping[str, tuple[Any, ...]] | None = None,
    num_trials: int = 6,
    num_processes: int = 1,
    progress: Progress | None = None,
) -> ClusterPlan:
    """The best configurations for a language model on a cluster.

    Args:
        model: as of ``shoal estimate``, or a function that builds it.
        machine: as of ``shoal.dry_run``.
        sequence: tokens of a row. ``global_batch``: rows of a step.
        config: keys that every configuration has (an optimizer, wire formats); others are chosen.
        space: by axis of ``shoal.planner.space.SPACE``, values to try in place of those.
        num_trials: how many are run dry at most.
        num_processes: that run dry at the same time, where the model is named by a text; above 1 the script needs
            ``if __name__ == "__main__":``.
        progress: is told what is done.

    Raises: UsageError: no candidate is possible with this number of ranks and this batch; a model of which the blocks
        do not repeat. Memory: that of the model's objects, without values.
    """
    tell = progress or (lambda what, done, total: None)
    tell("measuring a block", 0, num_trials + 1)
    num_at_once = min(num_processes, num_trials) if isinstance(model, str) else 1
    trials: list[Trial] = []
    running: set[Future[Trial]] = set()
    with _Here() if num_at_once == 1 else _processes(num_at_once) as pool:
        _, request, facts = prepare(model, num_ranks, machine, sequence, global_batch, config, space)
        ranked, rejected, tightest = search(request, facts)
        if tightest is None:
            raise impossible(request, rejected)
        chosen: list[tuple[Guess, Candidate]] = []
        for guess, one in diverse(ranked):
            if why := refused(one.config(request, facts), num_ranks):
                rejected[why] = rejected.get(why, 0) + 1
            elif len(chosen) < num_trials:
                chosen.append((guess, one))
            else:
                break
        total = len(chosen) + 1
        while chosen or running:
            while chosen and len(running) < num_at_once:
                guess, one = chosen.pop(0)
                if not _cannot_win(guess, trials, request):
                    tell(f"running {one}", len(trials) + 1, total)
                    running.add(pool.submit(_run, model, guess, one, request, facts))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            trials += [job.result() for job in done]
    trials.sort(key=lambda trial: (not trial.fits(request), bool(trial.error), trial.seconds))
    made = ClusterPlan(request, facts, tuple(trials), tuple(ranked), rejected, tightest)
    return made if made.best is not None else replace(made, advice=tuple(_advice(made)))


def prepare(
    model: str | Callable[[], nn.Module],
    num_ranks: int,
    machine: str | Path | GpuNode,
    sequence: int,
    global_batch: int,
    config: Mapping[str, Any] | None,
    space: Mapping[str, tuple[Any, ...]] | None,
) -> tuple[Callable[[], nn.Module], PlanRequest, ModelFacts]:
    """What ``search`` needs, and a function that builds the model. Args, Raises: as of ``plan``."""
    build, node = as_builder(model, sequence), machine_of(machine)
    asked = {**_fixed(config or {}), **(space or {})}
    for axis in ("sp", "cp"):
        if sequence < _LONG:
            asked.setdefault(axis, (1,))
    request = PlanRequest(num_ranks, node, sequence, global_batch, dict(config or {}), asked)
    return build, request, facts_of(build, sequence, node)


def _fixed(config: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Axes of which a configuration that proposals keep says the value."""
    parallel, zero = config.get("parallel", {}), config.get("zero_optimization", {})
    said = {axis: parallel.get(axis) for axis in ("pp", "tp", "sp", "cp", "ep")} | {"stage": zero.get("stage")}
    fixed: dict[str, tuple[Any, ...]] = {axis: (value,) for axis, value in said.items() if isinstance(value, int)}
    order = parallel.get("order", "auto")
    return fixed if order == "auto" else fixed | {"order": ("-".join(order),)}


class _Here(Executor):
    """Runs what is submitted at once."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        made: Future[Any] = Future()
        made.set_result(call(*args, **kwargs))
        return made


def _processes(num: int) -> ProcessPoolExecutor:
    """A pool of processes, which import what they need while this one goes on."""
    pool = ProcessPoolExecutor(num, mp_context=multiprocessing.get_context("spawn"))
    for _ in range(num):
        pool.submit(as_builder, "", None)
    return pool


def _cannot_win(guess: Guess, trials: Sequence[Trial], request: PlanRequest) -> bool:
    """True if a configuration is slower than the fastest that was run, even if its formula is as far off as any."""
    fitting = [trial.seconds for trial in trials if trial.fits(request)]
    return bool(fitting) and _SURE * guess.seconds > min(fitting)


def _run(
    model: str | Callable[[], nn.Module], guess: Guess, one: Candidate, request: PlanRequest, facts: ModelFacts
) -> Trial:
    """A dry run; a second one where a budget, or the blocks that stay gathered, were too large by the first."""
    build, capacity = as_builder(model, request.sequence), request.machine.gpu_nbytes
    trial = run_trial(one, guess, build, request, facts)
    if one.gathered and not trial.error and not trial.fits(request):
        released = replace(one, gathered=0)
        return run_trial(released, ClosedForms(request, facts).guess(released), build, request, facts)
    if one.recompute == "budget" and capacity is not None and not trial.error and not trial.fits(request):
        forms = ClosedForms(request, facts)
        less = forms.within(one, guess.nbytes - (trial.nbytes - _FILLED * USABLE * capacity))
        if less is not None:
            return run_trial(less, forms.guess(less), build, request, facts)
    return trial


def judge(
    model: str | Callable[[], nn.Module],
    num_ranks: int,
    *,
    config: Mapping[str, Any],
    machine: str | Path | GpuNode = "h100",
    sequence: int,
    progress: Progress | None = None,
) -> ClusterPlan:
    """A plan with one configuration, the given one. Args, Raises: as of ``plan``, and what loading the config does."""
    build, node = as_builder(model, sequence), machine_of(machine)
    settings = load(dict(config), world_size=num_ranks, warns=False)
    zero, mesh = settings.zero_optimization, mesh_of(settings, num_ranks)
    offloads = [section.device != "none" for section in (zero.offload_param, zero.offload_optimizer)]
    checkpointing, pipeline = settings.activation_checkpointing, settings.pipeline
    is_recomputed = checkpointing.modules is not None or pipeline.activation_checkpoint_interval > 0
    budget, single = checkpointing.memory_budget, {name: each for each, name in INTERLEAVED.items()}
    one = Candidate(
        **{axis: getattr(mesh, axis) for axis in ("pp", "tp", "sp", "cp", "ep")},
        order=order_name(mesh),
        virtual=pipeline.virtual_stages,
        schedule="1f1b" if mesh.pp == 1 else single.get(pipeline.schedule, pipeline.schedule),
        stage=zero.stage,
        shards="all" if mesh.dp_replicate == 1 else "node",
        micro=settings.train_micro_batch_size_per_gpu,
        recompute="budget" if budget is not None else "blocks" if is_recomputed else "none",
        budget=f"{budget >> 10}KiB" if isinstance(budget, int) else budget or "",
        every=checkpointing.offload_every,
        offload="all" if offloads[0] else "optimizer" if offloads[1] else "none",
    )
    request = PlanRequest(num_ranks, node, sequence, int(settings.train_batch_size), dict(config))
    tell = progress or (lambda what, done, total: None)
    tell("measuring a block", 0, 2)
    facts = facts_of(build, sequence, node)
    tell(f"running {one}", 1, 2)
    guess = ClosedForms(request, facts).guess(one)
    trial = run_trial(one, guess, build, request, facts, dict(config))
    return ClusterPlan(request, facts, (trial,), ((guess, one),), {}, (guess, one))


def parse_space(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Values of axes from texts such as "tp=8,16". Raises: UsageError: no axis, or no value of one."""
    asked: dict[str, tuple[Any, ...]] = {}
    for each in texts:
        axis, _, values = each.partition("=")
        asked[axis] = tuple(parse_filter(f"{axis}={value}")[axis] for value in values.split(","))
    return asked


def impossible(request: PlanRequest, rejected: Mapping[str, int]) -> UsageError:
    """The error where a search has found no candidate at all."""
    common = "; ".join(f"{why} ({count} times)" for why, count in Counter(rejected).most_common(3))
    return UsageError(
        f"no configuration is possible for {request.num_ranks} ranks and a global batch of {request.global_batch}:"
        f" {common}.",
        do="give a number of ranks and a batch with more divisors, such as powers of two.",
        code="plan-impossible",
    )


def search(
    request: PlanRequest, facts: ModelFacts, *, saves_always: bool = False
) -> tuple[list[tuple[Guess, Candidate]], dict[str, int], tuple[Guess, Candidate] | None]:
    """By the formulas: what fits, the fastest first; why others are impossible; what needs least memory.

    Args:
        saves_always: with each recomputation and offload also what fits without it.
    """
    forms, capacity = ClosedForms(request, facts), request.machine.gpu_nbytes
    usable = float("inf") if capacity is None else USABLE * capacity
    ranked: list[tuple[Guess, Candidate]] = []
    rejected: Counter[str] = Counter()
    tightest: tuple[Guess, Candidate] | None = None
    for possible, why in candidates(request, facts):
        if why:
            rejected[why] += 1
            continue
        fits = False
        for saving in with_savings(possible, request):
            one = forms.within(saving, _FILLED * usable) if saving.recompute == "budget" else saving
            if one is None:
                continue
            guess = forms.guess(one)
            if tightest is None or guess.nbytes < tightest[0].nbytes:
                tightest = (guess, one)
            if guess.nbytes <= usable:
                ranked.append((guess, one))
                fits = True
                more = forms.gathered(one, _FILLED * usable) if capacity is not None else None
                if more is not None:
                    ranked.append((forms.guess(more), more))
                if not saves_always:
                    break  # the next ones save memory at the cost of time
        if not fits:
            rejected["it does not fit in memory, by the formulas"] += 1
    ranked.sort(key=lambda each: each[0].seconds)
    return ranked, dict(rejected), tightest


def diverse(ranked: list[tuple[Guess, Candidate]]) -> list[tuple[Guess, Candidate]]:
    """The fastest of each family of parallelism, then the second of each, and so on; slow ones left out."""
    rounds: dict[int, list[tuple[Guess, Candidate]]] = {}
    seen: Counter[tuple[Any, ...]] = Counter()
    for guess, one in ranked:
        if guess.seconds > _WORST * ranked[0][0].seconds:
            break
        family = (one.pp, one.tp, one.sp * one.cp, one.ep, one.stage == 3)
        rounds.setdefault(seen[family], []).append((guess, one))
        seen[family] += 1
    return [each for number in sorted(rounds) for each in rounds[number]]


def explain(made: ClusterPlan, text: str) -> str:
    """Why the plan has no configuration with these values of axes: "tp=4 micro=2".

    Raises: UsageError: ``text`` names no axis or value.
    """
    wanted = parse_filter(text)

    def matches(one: Candidate) -> bool:
        return all(getattr(one, axis) == value for axis, value in wanted.items())

    run = [trial for trial in made.trials if matches(trial.candidate)]
    if made.best is not None and run and run[0] is made.best:
        return f"{text}: the best configuration has it."
    lines = []
    for trial in run:
        if trial.error:
            lines.append(f"{trial.candidate}: refused: {trial.error}")
        elif not trial.fits(made.request):
            lines.append(f"{trial.candidate}: needs {format_bytes(trial.nbytes)} in the dry run, which does not fit.")
        elif made.best is not None:
            slower = trial.seconds / made.best.seconds - 1
            lines.append(f"{trial.candidate}: {trial.seconds:.3g} s a step in the dry run, {slower:.0%} slower.")
    guesses = [(guess, one) for guess, one in made.ranked if matches(one)]
    if guesses and not run:
        guess, one = guesses[0]
        slower = guess.seconds / made.ranked[0][0].seconds - 1
        lines.append(
            f"the best of {len(guesses)} by the formulas, {one}: {guess.seconds:.3g} s a step, {slower:.0%} slower than"
            f" the best by them; of that, exposed communication {guess.exposed:.2g} s, bubble {guess.bubble:.2g} s."
        )
    if not guesses:
        wider = replace(
            made.request, space={**made.request.space, **{axis: (value,) for axis, value in wanted.items()}}
        )
        _, rejected, tightest = search(wider, made.facts)
        lines += [f"{count} candidates: {why}" for why, count in Counter(rejected).most_common(5)]
        if tightest is not None and made.request.machine.gpu_nbytes is not None:
            lines.append(
                f"the tightest, {tightest[1]}, needs {format_bytes(tightest[0].nbytes)} of"
                f" {format_bytes(made.request.machine.gpu_nbytes)}"
            )
    return "\n".join(lines)


def _advice(made: ClusterPlan) -> list[str]:
    """Which limit to raise so that something fits: the least of each, by the formulas."""
    request, facts = made.request, made.facts
    lines = []
    for factor in (2, 4, 8, 16):
        more = replace(request, num_ranks=factor * request.num_ranks, global_batch=factor * request.global_batch)
        if search(more, facts)[0]:
            lines.append(f"{more.num_ranks:,} GPUs, with a global batch of {more.global_batch:,}")
            break
    for factor in (2, 4, 8, 16):
        block, outer = (
            replace(part, saved=part.saved // factor, forward=part.forward / factor, backward=part.backward / factor)
            for part in (facts.block, facts.outer)
        )
        less = replace(facts, block=block, outer=outer, peak=facts.peak // factor, boundary=facts.boundary // factor)
        shorter = replace(request, sequence=request.sequence // factor)
        if search(shorter, less)[0]:
            lines.append(f"sequences of {shorter.sequence:,} tokens")
            break
    if "offload" in request.space and search(replace(request, space={**request.space, "offload": ("all",)}), facts)[0]:
        lines.append("offload of optimizer state and parameters to the host")
    for factor in (2, 4, 8):
        larger = replace(request.machine, gpu_nbytes=factor * (request.machine.gpu_nbytes or 0))
        if search(replace(request, machine=larger), facts)[0]:
            lines.append(f"GPUs with {format_bytes(larger.gpu_nbytes or 0)}")
            break
    return lines
