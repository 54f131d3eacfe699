"""Plans: the formulas against the dry run, what is proposed and what is not, and the files that a plan writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.config.parallel import INTERLEAVED
from shoal.errors import UsageError
from shoal.models import GPT, GPTConfig
from shoal.pipeline.schedule import build_schedule
from shoal.planner import report
from shoal.planner.closed_forms import ClosedForms, in_flight
from shoal.planner.dry_model import dry_run_model
from shoal.planner.facts import ModelFacts, facts_of
from shoal.planner.search import ClusterPlan, explain, judge, plan, search
from shoal.planner.space import Candidate, PlanRequest, candidates, parse_filter, refused
from shoal.planner.trial import Trial, run_trial
from shoal.simulation.machines import machine_of
from shoal.text import parse_bytes

H100 = machine_of("h100").compiled()  # the host is ahead of two blocks
# Wide enough that matrices take the time, and few blocks.
SHAPE = GPTConfig(vocab_size=8192, sequence_length=2048, num_layers=2, hidden_size=2048, num_heads=16, tied=False)


def build(shape: GPTConfig = SHAPE) -> nn.Module:
    return GPT(shape)


def request(ranks: int = 8, batch: int = 8, **space: Any) -> PlanRequest:
    return PlanRequest(ranks, H100, SHAPE.sequence_length, batch, space=space)


@cache
def facts() -> ModelFacts:
    return facts_of(build, SHAPE.sequence_length, H100)


@cache
def ran(**axes: Any) -> Trial:
    one, asked = Candidate(**axes), request()
    trial = run_trial(one, ClosedForms(asked, facts()).guess(one), build, asked, facts())
    assert not trial.error
    return trial


@cache
def small_plan() -> ClusterPlan:
    """Two blocks on 4 GPUs, of which nothing but the number of rows is chosen."""
    axes = {"tp": (1,), "pp": (1,), "stage": (1, 3), "shards": ("all",)}
    return plan(build, 4, sequence=512, global_batch=8, space=axes, num_trials=2)


# the model


def test_a_block_and_the_rest_are_those_of_the_models_own_formulas() -> None:
    found = facts()
    assert found.numel == SHAPE.num_parameters()
    assert found.flops_per_token == SHAPE.flops_per_token()
    assert (found.num_blocks, found.prefix, found.period, found.block_class) == (2, 0, 1, "Block")
    hidden = 2 * SHAPE.sequence_length * SHAPE.hidden_size  # bytes of a row
    assert found.boundary == hidden
    # Inputs of two norms and of three matrices, of GELU (4 + 4), query, key, value and the output of attention.
    assert found.block.saved == pytest.approx(16 * hidden, rel=0.02)
    # At least the time of its products on the tensor cores, and backward has twice the products of forward.
    assert found.block.forward > found.block.flops / H100.peak_flops
    assert found.block.backward == pytest.approx(2 * found.block.forward, rel=0.15)


def test_blocks_that_alternate_are_reckoned_by_the_period_and_first_ones_apart() -> None:
    def mixed(kinds: str) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            model = build(replace(SHAPE, num_layers=len(kinds), hidden_size=256, num_heads=4, vocab_size=512))
            for block, kind in zip(model.blocks, kinds, strict=True):  # type: ignore[arg-type]
                if kind == "b":
                    block.attention_norm = nn.RMSNorm(256)
            return model

        return made

    found = facts_of(mixed("ababab"), 128, H100)
    assert (found.prefix, found.period, found.num_blocks) == (0, 2, 6)
    found = facts_of(mixed("aabbb"), 128, H100)
    assert (found.prefix, found.period, found.num_blocks) == (2, 1, 3)
    with pytest.raises(UsageError, match="do not repeat"):
        facts_of(mixed("aababbabbb"), 128, H100)


# the formulas


@pytest.mark.parametrize(
    ("axes", "seconds"),
    [
        ({"stage": 1}, 0.1),
        ({"stage": 3}, 0.15),
        ({"stage": 1, "recompute": "blocks"}, 0.1),
        ({"stage": 1, "tp": 2, "micro": 2}, 0.3),  # kernels of half the size reach less
    ],
    ids=str,
)
def test_the_formulas_give_memory_and_time_of_the_dry_run(axes: dict[str, Any], seconds: float) -> None:
    trial = ran(**axes)
    assert trial.memory is not None
    for kind in ("parameter", "master", "optimizer state"):
        assert trial.guess.memory[kind] == pytest.approx(trial.memory[kind], rel=0.01), kind
    assert trial.guess.nbytes == pytest.approx(trial.nbytes, rel=0.15)
    assert trial.guess.compute == pytest.approx(trial.compute, rel=max(seconds, 0.1))
    assert trial.guess.seconds == pytest.approx(trial.seconds, rel=seconds)


def tried(shape: GPTConfig, one: Candidate, *, ranks: int = 8, batch: int = 8) -> Trial:
    asked, known = of_shape(shape, ranks, batch)
    trial = run_trial(one, ClosedForms(asked, known).guess(one), lambda: GPT(shape), asked, known)
    assert not trial.error
    return trial


@cache
def of_shape(shape: GPTConfig, ranks: int = 8, batch: int = 8) -> tuple[PlanRequest, ModelFacts]:
    known = facts_of(lambda: GPT(shape), shape.sequence_length, H100)
    return replace(request(ranks, batch), sequence=shape.sequence_length), known


DEEP = replace(SHAPE, num_layers=8, hidden_size=1024, sequence_length=1024)


def test_a_memory_budget_is_filled_with_blocks_that_are_not_recomputed() -> None:
    asked, known = of_shape(DEEP)
    forms, one = ClosedForms(asked, known), Candidate(stage=1)
    most, least = (forms.guess(replace(one, recompute=each)).nbytes for each in ("none", "blocks"))
    allowed = (most + least) // 2
    within = forms.within(one, allowed)
    assert within is not None and within.recompute == "budget"
    trial = tried(DEEP, within)
    saved_by_one = known.block.saved - known.boundary
    assert allowed - saved_by_one < trial.guess.nbytes <= allowed
    assert trial.memory is not None
    assert trial.guess.memory["activation"] == pytest.approx(trial.memory["activation"], rel=0.03)
    assert trial.guess.nbytes == pytest.approx(trial.nbytes, rel=0.1)
    assert trial.seconds == pytest.approx(trial.guess.seconds, rel=0.15)
    tight = replace(asked, machine=replace(H100, gpu_nbytes=allowed), space={"offload": ("none",), "micro": (1,)})
    ranked, _, _ = search(tight, known)
    assert any(one.recompute == "budget" and one.stage == 1 and one.tp == 1 for _, one in ranked)
    assert forms.within(one, 2 * most) is None  # no block has to be recomputed
    assert forms.within(one, least // 2) is None


def test_activations_are_offloaded_in_place_of_some_recomputation_within_the_same_memory() -> None:
    shape = replace(DEEP, num_layers=16, hidden_size=2048, sequence_length=4096)
    asked, known = of_shape(shape, batch=32)
    forms, one = ClosedForms(asked, known), Candidate(stage=3, micro=4)
    most, least = (forms.guess(replace(one, recompute=each)).nbytes for each in ("none", "blocks"))
    allowed = (2 * most + 3 * least) // 5
    within = forms.within(one, allowed)
    assert within is not None and within.every > 1  # the copy of a block takes longer than its forward
    busy = forms.within(replace(one, offload="optimizer"), allowed // 2)
    assert busy is not None and busy.every == 0  # copies of states use the same bus
    slow = replace(asked, machine=replace(H100, bus_bandwidth=H100.bus_bandwidth / 100))
    recomputed = ClosedForms(slow, known).within(one, allowed)
    assert recomputed is not None and recomputed.every == 0
    both = [tried(shape, each, batch=32) for each in (within, recomputed)]
    for trial in both:
        assert trial.memory is not None
        assert trial.memory["activation"] <= (parse_bytes(trial.candidate.budget) or 0) + 4 * known.peak
        assert trial.guess.nbytes <= allowed
        assert trial.guess.memory["activation"] == pytest.approx(trial.memory["activation"], rel=0.005)
        assert trial.seconds == pytest.approx(trial.guess.seconds, rel=0.1)
    assert both[0].seconds < 0.99 * both[1].seconds


def test_memory_that_is_left_keeps_blocks_gathered_where_the_network_is_slow() -> None:
    asked, known = of_shape(DEEP)
    one = Candidate(stage=3)
    assert ClosedForms(asked, known).gathered(one, 80e9) is None  # inside a node gathers are hidden
    asked = replace(asked, machine=replace(H100, gpus_per_node=1))
    forms = ClosedForms(asked, known)
    block = 2 * known.block.numel
    more = forms.gathered(one, forms.guess(one).nbytes + 5.5 * block)
    assert more == replace(one, gathered=5)
    assert forms.gathered(one, 80e9) == replace(one, gathered=DEEP.num_layers - 1)
    assert forms.gathered(one, forms.guess(one).nbytes + 0.5 * block) is None
    assert forms.gathered(Candidate(stage=1), 80e9) is None
    few, many = (
        run_trial(each, forms.guess(each), lambda: GPT(DEEP), asked, known) for each in (replace(one, gathered=2), more)
    )
    saved = few.guess.seconds - many.guess.seconds
    assert saved > 0.1 * few.seconds
    assert few.seconds - many.seconds == pytest.approx(saved, rel=0.02)
    assert many.nbytes - few.nbytes == pytest.approx(3 * block, rel=0.3)
    for trial in (few, many):
        assert trial.guess.seconds == pytest.approx(trial.seconds, rel=0.1)
        assert trial.guess.nbytes == pytest.approx(trial.nbytes, rel=0.1)
    tight = replace(asked, space={"offload": ("none",), "micro": (1,), "stage": (3,), "tp": (1,), "pp": (1,)})
    ranked, _, _ = search(tight, known)
    assert ranked[0][1].gathered == DEEP.num_layers - 1


@pytest.mark.parametrize(
    ("one", "sequence"),
    # Of several stages on a rank, rows are so long that messages between stages take little.
    [(Candidate(pp=2), 2048), (Candidate(pp=2, schedule="zb_h1"), 2048), (Candidate(pp=2, virtual=2), 4096)],
    ids=str,
)
def test_the_formulas_know_what_a_pipeline_has_in_memory_and_waits_for(one: Candidate, sequence: int) -> None:
    trial = tried(replace(DEEP, num_layers=4, sequence_length=sequence), one, ranks=2)
    assert trial.guess.nbytes == pytest.approx(trial.nbytes, rel=0.15)
    assert trial.guess.seconds == pytest.approx(trial.seconds, rel=0.05)
    assert trial.guess.bubble == pytest.approx(trial.bubble, abs=0.03 * trial.seconds)


@pytest.mark.parametrize(
    ("schedule", "pp", "virtual"), [("1f1b", 4, 1), ("1f1b", 4, 4), ("1f1b", 8, 2), ("zb_h1", 4, 1)]
)
def test_as_many_micro_batches_are_in_flight_as_the_schedule_has(schedule: str, pp: int, virtual: int) -> None:
    name = INTERLEAVED[schedule] if virtual > 1 else schedule
    for rank, order in enumerate(build_schedule(name, pp, 3 * pp, virtual_stages=virtual).actions):
        if rank in (0, pp - 1):
            steps = [{"F": 1, "B": -1, "W": -1}.get(action.kind, 0) for action in order]
            one = Candidate(pp=pp, virtual=virtual, schedule=schedule)
            assert in_flight(one, 3 * pp, is_last=rank > 0) == max(accumulate(steps)) / virtual


def test_long_rows_are_split_by_the_formulas_as_in_the_dry_run() -> None:
    trial = tried(replace(SHAPE, sequence_length=32_768), Candidate(stage=3, sp=2, cp=2))
    assert trial.guess.nbytes == pytest.approx(trial.nbytes, rel=0.1)
    assert trial.guess.seconds == pytest.approx(trial.seconds, rel=0.1)


def test_experts_are_divided_by_the_formulas_as_in_the_dry_run() -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.MixtralConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_local_experts=8
    )
    known = facts_of(lambda: transformers.MixtralForCausalLM(shape), SHAPE.sequence_length, H100)
    one = Candidate(stage=1, ep=4)
    trial = run_trial(
        one, ClosedForms(request(), known).guess(one), lambda: transformers.MixtralForCausalLM(shape), request(), known
    )
    assert trial.memory is not None and not trial.error
    for kind in ("parameter", "gradient", "master", "optimizer state"):
        assert trial.guess.memory[kind] == pytest.approx(trial.memory[kind], rel=0.02), kind
    assert trial.guess.nbytes == pytest.approx(trial.nbytes, rel=0.15)


def test_the_formulas_rank_as_the_dry_run_does() -> None:
    trials = [ran(stage=1), ran(stage=3), ran(stage=1, recompute="blocks"), ran(stage=1, tp=2, micro=2)]
    ranked = [
        sorted(trials[:3], key=lambda trial: each(trial)) for each in (lambda t: t.guess.seconds, lambda t: t.seconds)
    ]
    assert ranked[0] == ranked[1]


def test_the_bubble_is_that_of_the_formula() -> None:
    one = Candidate(pp=4, stage=1)
    few, many = (ClosedForms(request(batch=batch), facts()).guess(one) for batch in (16, 64))
    assert few.bubble == pytest.approx(many.bubble)  # of 3 micro-batches, whatever their number
    interleaved = ClosedForms(request(ranks=4), facts()).guess(replace(one, pp=2, virtual=2))
    plain = ClosedForms(request(ranks=4), facts()).guess(replace(one, pp=2))
    assert interleaved.bubble == pytest.approx(plain.bubble / 2)


def test_a_pipeline_of_four_is_told_from_one_of_two() -> None:
    shape = replace(SHAPE, num_layers=4, sequence_length=1024)
    made, asked = (lambda: build(shape)), replace(request(ranks=4, batch=4), sequence=1024)
    known, one = facts_of(made, 1024, H100), Candidate(pp=4, stage=1)
    trial = run_trial(one, ClosedForms(asked, known).guess(one), made, asked, known)
    whole = dry_run_model(made, one.config(asked, known), 4, machine=H100, sequence=1024)
    assert trial.seconds == pytest.approx(whole.seconds, rel=0.1)
    assert trial.nbytes == pytest.approx(whole.memory.allocated, rel=0.1)


# the search


def test_other_orders_of_the_axes_are_proposed_where_nodes_make_a_difference() -> None:
    def orders(asked: PlanRequest, **axes: Any) -> set[str]:
        of = [one for one, why in candidates(asked, facts()) if not why]
        return {one.order for one in of if all(getattr(one, axis) == value for axis, value in axes.items())}

    assert orders(request(8, 32)) == {"auto"}  # on one node
    asked = request(16, 32, cp=(1, 2))
    assert orders(asked, pp=1, cp=1) == {"auto"}
    assert orders(asked, pp=2, cp=1, tp=4) == {"auto", "pp_inside"}
    assert orders(asked, pp=2, cp=1, tp=8) == {"auto"}
    assert orders(asked, pp=1, cp=2, tp=4, shards="all") == {"auto", "cp_outside"}
    assert orders(request(16, 32, order=("tp-dp_shard",), cp=(1,)), pp=1, tp=2, shards="all") == {"tp-dp_shard"}
    why = {text for one, text in candidates(request(8, 8, order=("pp_inside", "tp")), facts()) if text}
    assert {"the order pp_inside changes nothing", "the order of the axes is tp: without dp_shard = 8."} <= why
    one = Candidate(pp=2, tp=2, order="pp_inside")
    config = one.config(request(16, 32), facts())
    assert config["parallel"]["order"] == ["dp_shard", "pp", "tp"]
    assert judge("nano", 16, config={**config, "bf16": {"enabled": True}}, sequence=64).trials[0].candidate == replace(
        one, order="dp_shard-pp-tp", micro=1
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_the_formulas_and_the_dry_run_know_which_axes_are_inside_of_a_node(stage: int) -> None:
    asked = request(16, 8)
    trials = []
    for one in (Candidate(cp=2, stage=stage), Candidate(cp=2, stage=stage, order="cp_outside")):
        trials.append(run_trial(one, ClosedForms(asked, facts()).guess(one), build, asked, facts()))
        assert not trials[-1].error
    inside, outside = trials
    assert outside.guess.seconds > 1.1 * inside.guess.seconds
    assert outside.seconds > 1.1 * inside.seconds
    assert (outside.received, outside.nbytes) == (inside.received, inside.nbytes)


def test_impossible_degrees_are_not_proposed() -> None:
    possible, reasons = [], set()
    for one, why in candidates(
        request(ranks=8, batch=8), replace(facts(), divisible={"heads": 6, "key-value heads": 6})
    ):
        if why:
            reasons.add(why)
        else:
            possible.append(one)
    assert "tp x sp = 4 does not divide 6 heads" in reasons
    assert "16 pipeline stages do not divide 2 equal blocks" in reasons
    assert "zb_h1 needs pipeline stages, one on a rank" in reasons
    assert "16 model-parallel ranks do not divide 8 ranks" in reasons
    assert any("do not divide the global batch of 8" in why for why in reasons)
    for one in possible:
        assert not 6 % (one.tp * one.sp)
        assert not 2 % (one.pp * one.virtual)
        assert one.micro * one.num_micro(request()) * 8 == 8 * one.model_ranks
        assert not refused(one.config(request(), facts()), 8)


def test_the_best_configuration_trains_unchanged_and_has_the_batch_asked_for() -> None:
    made = small_plan()
    assert made.best is not None
    assert made.best.seconds == min(trial.seconds for trial in made.trials if trial.fits(made.request))
    config = made.best.config
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 4 == 8
    judged = judge(build, 4, config=config, sequence=512)
    assert judged.best is not None
    assert judged.best.seconds == pytest.approx(made.best.seconds)
    assert judged.request.global_batch == 8


def test_what_is_refused_or_slower_is_explained() -> None:
    made = small_plan()
    assert made.best is not None
    assert "the best configuration has it" in explain(made, f"stage={made.best.candidate.stage}")
    assert "16 model-parallel ranks do not divide 4 ranks" in explain(made, "tp=8 pp=2")
    assert "slower" in explain(made, f"stage={4 - made.best.candidate.stage}")
    with pytest.raises(UsageError, match="tp=three"):
        parse_filter("tp=three")
    with pytest.raises(UsageError, match="'order=pp-dq' is no value of the search"):
        parse_filter("order=pp-dq")
    assert parse_filter("order=cp-dp_shard tp=2") == {"order": "cp-dp_shard", "tp": 2}


def test_what_does_not_fit_is_said_with_what_would_do() -> None:
    tiny = replace(H100, gpu_nbytes=400_000_000)
    axes = {"tp": (1,), "pp": (1,), "shards": ("all",), "offload": ("none",)}
    made = plan(build, 8, machine=tiny, sequence=2048, global_batch=8, space=axes)
    assert made.best is None
    assert not made.trials
    assert made.tightest is not None
    assert made.tightest[1].recompute == "blocks"
    assert made.tightest[0].nbytes > 400_000_000
    assert any("GPUs with" in line for line in made.advice)
    assert "nothing fits" in report.text(made)
    with pytest.raises(UsageError, match="no configuration is possible"):
        plan(build, 7, sequence=2048, global_batch=8, space=axes)


# the command


def test_the_command_writes_a_file_that_trains_json_and_a_page(tmp_path: Path) -> None:
    made = small_plan()
    assert made.best is not None
    paths = report.write(made, tmp_path, price=2.0)
    assert [path.name for path in paths] == ["config.json", "plan.json", "report.html"]
    figures = json.loads((tmp_path / "plan.json").read_text())["configurations"][0]
    rate = 8 * 512 / made.best.seconds / 4
    assert figures["tokens_per_second_per_gpu"] == pytest.approx(rate)
    assert figures["cost_per_billion_tokens"] == pytest.approx(1e9 / (4 * rate) * 4 * 2.0 / 3600)
    assert figures["mfu"] == pytest.approx(rate * made.facts.flops_per_token / 989e12)
    assert figures["seconds_interval"][0] < figures["seconds"] < figures["seconds_interval"][1]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 3
    config = tmp_path / "config.json"
    arguments = ["plan", "nano", "-n", "4", "--sequence", "64", "--config", str(config), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["configurations"][0]["fits"]
    plans = [str(tmp_path / "plan.json")] * 2
    assert "tokens/s/GPU" in CliRunner().invoke(app, ["plan", "--diff", *plans]).stdout
