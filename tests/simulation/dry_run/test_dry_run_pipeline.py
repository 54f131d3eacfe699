"""A dry run of pipeline stages: a rank of each, whose simulated streams wait for each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.errors import CommError, ModelError, UsageError
from shoal.pipeline.messages import Channel
from shoal.pipeline.module import PipelineModule
from shoal.simulation.collective_times import Links
from shoal.simulation.dry_run import DryRun, PipelineDryRun
from shoal.simulation.machines import machine_of
from shoal.simulation.times import COMMUNICATION, COMPUTE, STAGES

WIDTH, ROWS, NUM_BLOCKS, NUM_MICRO = 1024, 512, 8, 8
# Communication, the host and short kernels cost nothing: the rest is what the schedule says.
IDEAL = replace(
    machine_of("h100"),
    launch_seconds=0.0,
    kernel_seconds=0.0,
    kernel_latency=0.0,
    tile_prologue=0.0,
    links=Links(1e18, 1e18, latency_factor=0.0),
    memory_bandwidth=1e18,
    bus_bandwidth=1e18,
)


class Scale(nn.Module):
    """The first layer: without it, the first matrix would need no gradient of its input, and stages were not equal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Matrices(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + out


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batches(rows: int = ROWS, width: int = WIDTH) -> Iterator[Any]:
    while True:
        yield torch.zeros(rows, width), torch.zeros(rows, width)


def config(pp: int, schedule: str = "1f1b", virtual: int = 1, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": NUM_MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "parallel": {"pp": pp},
        "pipeline": {"schedule": schedule, "virtual_stages": virtual},
        **sections,
    }


def engine_of(made: dict[str, Any], width: int = WIDTH) -> Any:
    model = PipelineModule([Scale(width), *(Matrices(width) for _ in range(NUM_BLOCKS))], loss_fn=loss)
    return shoal.initialize(model=model, config=made)[0]


def trains(made: dict[str, Any]) -> Callable[[DryRun], None]:
    def train(run: DryRun) -> None:
        engine, data = engine_of(made), batches()
        for _ in range(2):
            with run.step():
                engine.train_batch(data)
        engine.destroy()

    return train


def share_of_stages(found: PipelineDryRun) -> list[float]:
    return [run.steps[-1].share(STAGES) for run in found.stages]


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bubble_is_that_of_the_formula(pp: int, schedule: str) -> None:
    found = shoal.dry_run_pipeline(trains(config(pp, schedule)), pp, pp, machine=IDEAL)
    bubble = (pp - 1) / (NUM_MICRO + pp - 1)
    assert share_of_stages(found) == pytest.approx([bubble] * pp, abs=0.005)
    for run in found.stages:
        step = run.steps[-1]
        assert step.seconds == pytest.approx(found.stages[0].steps[-1].seconds, rel=1e-3)  # the step ends for all
        assert step.by_kind[COMPUTE] + step.by_kind[STAGES] == pytest.approx(step.seconds, rel=0.01)


def test_schedules_with_virtual_stages_and_split_backwards_have_smaller_bubbles() -> None:
    found = {
        schedule: share_of_stages(shoal.dry_run_pipeline(trains(config(4, schedule, virtual)), 4, 4, machine=IDEAL))
        for schedule, virtual in (("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2))
    }
    assert found["interleaved_1f1b"] == pytest.approx([3 / (2 * NUM_MICRO + 3)] * 4, abs=0.01)
    assert max(found["zb_h1"]) < 3 / (NUM_MICRO + 3) - 0.1
    assert max(found["zbv"]) < 0.06


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bytes_and_memory_are_those_of_a_real_run(stage: int) -> None:
    made, width, rows = config(2, zero_optimization={"stage": stage}), 64, 16

    def memory(engine: Any) -> dict[str, int]:
        kinds = engine.memory_report().by_kind()
        return {kind: kinds[kind] for kind in ("parameter", "gradient", "master", "optimizer state")}

    held: dict[int, dict[str, int]] = {}

    def train(run: DryRun) -> None:
        engine, data = engine_of(made, width), batches(rows, width)
        for _ in range(2):
            with run.step():
                engine.train_batch(data)
        held[run.world.rank] = memory(engine)
        engine.destroy()

    def real() -> tuple[dict[str, int], dict[str, int]]:
        engine, data = engine_of(made, width), batches(rows, width)
        for _ in range(2):
            with engine.world.recorder.recording() as entries:
                engine.train_batch(data)
        received: dict[str, int] = {}
        for entry in entries:
            received[entry.op] = received.get(entry.op, 0) + entry.nbytes
        found = memory(engine), received
        engine.destroy()
        return found

    dry, found = shoal.dry_run_pipeline(train, 4, 2), run_ranks(4, real)
    assert [run.world.rank for run in dry.stages] == [0, 2]
    for run in dry.stages:
        theirs, received = found[run.world.rank]
        assert held[run.world.rank] == theirs
        received.pop("send")  # nothing is received
        assert {op: nbytes for op, nbytes in run.steps[-1].received.items() if nbytes} == received
        assert received["recv"] == NUM_MICRO * rows * width * 4


def test_on_gpus_four_sent_messages_are_kept_however_many_stages_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    send, kept = Channel.send, []

    def count(self: Channel, *args: Any, **options: Any) -> None:
        send(self, *args, **options)
        kept.append(len(self.sent))

    monkeypatch.setattr(Channel, "send", count)
    shoal.dry_run_pipeline(trains(config(2, "interleaved_1f1b", 4)), 2, 2)
    assert max(kept) == 4 + 1


def test_slow_links_are_waited_for() -> None:
    slow = replace(IDEAL, links=replace(IDEAL.links, local=1e9))
    found = shoal.dry_run_pipeline(trains(config(2)), 2, 2, machine=slow)
    first = found.stages[0].steps[-1]
    assert first.by_kind[COMMUNICATION] > 2 * ROWS * WIDTH * 4 / 1e9  # at least the last gradient's
    assert first.busy[COMMUNICATION] > 2 * NUM_MICRO * ROWS * WIDTH * 4 / 1e9  # all that it sends and receives


def test_the_report_and_the_trace_have_all_stages(tmp_path: Path) -> None:
    found = shoal.dry_run_pipeline(trains(config(2)), 4, 2)
    lines = found.report().splitlines()
    assert lines[0].startswith("2 pipeline stages on 4 ranks, h100, step 2: ")
    assert lines[1].split()[:4] == ["stage", "rank", "ms", "compute"] and "waits: other stages" in lines[1]
    assert [line.split()[:2] for line in lines[3:]] == [["0", "0"], ["1", "2"]]
    assert "waiting for other stages" in found.stages[0].report()
    events = json.loads(found.write_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 2}
    assert any(event["name"].startswith("send 'stage 1 F0'") for event in events)


def test_a_plain_model_is_cut_as_in_a_real_run() -> None:
    from shoal.models import GPT, GPTConfig

    def train(run: DryRun) -> None:
        model = GPT(GPTConfig(vocab_size=64, sequence_length=32, num_layers=4, hidden_size=32, num_heads=2))
        made = config(2, bf16={"enabled": True}, zero_optimization={"stage": 2})
        made["parallel"] = {"pp": 2, "tp": 2}
        engine = shoal.initialize(model=model, config=made)[0]
        tokens = torch.zeros(1, 32, dtype=torch.long)
        for _ in range(2):
            with run.step():
                engine.train_batch(iter([(tokens, tokens)] * NUM_MICRO))
        engine.destroy()

    found = shoal.dry_run_pipeline(train, 8, 2)
    assert [run.world.rank for run in found.stages] == [0, 4]
    assert all(run.steps[-1].received["recv"] > 0 for run in found.stages)


# errors


def test_a_number_of_stages_that_is_not_the_configs_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"the dry run has 2 pipeline stages on ranks \[0, 2\], and the config 4"):
        shoal.dry_run_pipeline(trains(config(4)), 4, 2)
    with pytest.raises(UsageError, match="6 ranks cannot be divided among 4 pipeline stages"):
        shoal.dry_run_pipeline(trains(config(4)), 6, 4)


def test_what_one_stage_raises_ends_the_others() -> None:
    def train(run: DryRun) -> None:
        engine = engine_of(config(2))
        if run.world.rank == 1:
            raise ArithmeticError("the script's own")
        engine.train_batch(batches())

    with pytest.raises(ArithmeticError, match="the script's own"):
        shoal.dry_run_pipeline(train, 2, 2)


def test_stages_that_do_something_else_are_an_error_and_no_hang() -> None:
    def other(run: DryRun) -> None:
        engine = engine_of(config(2))
        engine.train_batch(batches())
        if run.world.rank == 1:
            engine.train_batch(batches())

    with pytest.raises(CommError, match="waits for another one"):
        shoal.dry_run_pipeline(other, 2, 2)


def test_a_step_that_was_not_measured_is_named() -> None:
    found = shoal.dry_run_pipeline(lambda run: engine_of(config(2)).destroy(), 2, 2)
    assert found.report() == "no step was measured: use `with run.step():` on every stage."


def test_a_model_without_blocks_is_an_error_of_the_model() -> None:
    def train(run: DryRun) -> None:
        shoal.initialize(model=nn.Linear(8, 8), config=config(2))

    with pytest.raises(ModelError):
        shoal.dry_run_pipeline(train, 2, 2)
