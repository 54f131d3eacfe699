"""``flops_profiler`` in the config: one step is counted, at every stage, and rank 0 prints it once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.engine.profiling import ProfilingTimers
from shoal.models.gpt import GPT, GPTConfig
from shoal.observe.flops_profiler import FlopsProfiler
from shoal.observe.timers import StepTimers
from tests.helpers import models
from tests.helpers.training import BF16, ROWS, STAGES, batch, config, make, named, start, start_with

# Plain: rows x tokens, through 3 blocks of 12 -> 24 -> 12, and a head of 12 -> 13
MACS = ROWS * models.SEQUENCE * (3 * 2 * 12 * 24 + 12 * 13)
TOKENS = ROWS * models.SEQUENCE
# 4 norms with a weight, and in each block a gelu and an addition
FLOPS = 2 * MACS + TOKENS * (4 * 5 * 12 + 3 * (24 + 12))
PARAMETERS = 13 * 12 + 3 * (2 * 12 + 12 * 24 + 24 + 24 * 12 + 12) + 2 * 12 + 3 * 3 + 3


def profiling(path: Path | None = None, **more: Any) -> dict[str, Any]:
    return {"enabled": True, "profile_step": 1, "output_file": None if path is None else str(path), **more}


def hooks_of(module: nn.Module) -> list[list[int]]:
    return [[*each._forward_pre_hooks, *each._forward_hooks] for each in module.modules()]


def train(engine: shoal.Engine, steps: int, num_micro: int = 1) -> list[list[list[int]]]:
    """Returns: the hooks on the model after each step."""
    seen = []
    for step in range(steps):
        for micro in range(num_micro):
            tokens, targets = batch(num_micro * step + micro, engine.global_rank, engine.world_size)
            engine.backward(engine(tokens, targets))
            engine.step()
        seen.append(hooks_of(engine.module))
    return seen


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_is_counted_as_one_rank_computes_it_and_of_the_whole_model(
    stage: int, world: int, tmp_path: Path
) -> None:
    path = tmp_path / "profile.txt"

    def job() -> tuple[Any, ...]:
        engine = start(models.Plain, config(stage, flops_profiler=profiling(path)))
        hooks = train(engine, 3)
        profiler = engine.flops_profiler
        assert profiler is not None
        assert hooks[0] == hooks[1] == hooks[2]
        return profiler.macs, profiler.flops, profiler.params

    first, *others = run_ranks(world, job)
    assert first == (MACS, FLOPS, PARAMETERS)
    assert all(other == (0, 0, 0) for other in others)  # rank 0 speaks for all
    page = path.read_text()
    assert re.search(rf"data parallel size: +{world}\n", page)
    assert re.search(r"bwd MACs counted / fwd MACs: +2\.00\n", page)
    assert re.search(r"samples/second: +[0-9.]+\n", page)
    assert ("latencies of modules include the gathering" in page) == (stage == 3 and world == 2)


def test_the_ranks_that_a_layer_is_split_over_are_printed_also_by_a_profiler_of_the_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.txt"

    def job() -> None:
        model = make(lambda: GPT(GPTConfig(16, 8, 1, 16, 2)))
        engine = start_with(model, config(1, parallel={"tp": 2}, flops_profiler=profiling(path)))
        train_on = torch.zeros(2, 8, dtype=torch.long)
        profiler = FlopsProfiler(engine.module, engine)
        for _ in range(2):
            engine.backward(engine(train_on, train_on))
            engine.step()
        profiler.start_profile()
        engine(train_on, train_on)
        profiler.stop_profile()
        if engine.global_rank == 0:
            profiler.print_model_profile()
        profiler.end_profile()
        engine.destroy()

    run_ranks(2, job)
    for text in (path.read_text(), capsys.readouterr().out):
        assert re.search(r"model parallel size: +2\n", text) and re.search(r"data parallel size: +1\n", text)


def test_it_is_printed_once_on_rank_0_and_training_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    def job(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
        engine = start(models.Plain, settings)
        train(engine, 3)
        engine.destroy()
        return {name: parameter.detach().clone() for name, parameter in named(engine).items()}

    plain = run_ranks(2, lambda: job(config(3)))[0]
    capsys.readouterr()
    profiled = run_ranks(2, lambda: job(config(3, flops_profiler=profiling())))[0]
    assert capsys.readouterr().out.count("Flops Profiler: step 1") == 1
    assert all(torch.equal(plain[name], value) for name, value in profiled.items())


def test_a_gpt_has_the_flops_of_its_formula(tmp_path: Path) -> None:
    shape = GPTConfig(vocab_size=32, sequence_length=8, num_layers=2, hidden_size=16, num_heads=2)

    def job() -> int:
        settings = config(3, flops_profiler=profiling(tmp_path / "profile.txt", profile_step=0))
        engine = start(lambda: GPT(shape), settings)
        tokens = torch.arange(2 * 9).view(2, 9) % 32
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
        assert engine.flops_profiler is not None
        return engine.flops_profiler.macs

    assert run_ranks(2, job)[0] * 2 * 3 == shape.flops_per_token() * 2 * 8


@pytest.mark.usefixtures("deepspeed_classes")
def test_the_step_may_go_by_its_short_name(tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"

    def job() -> Any:
        engine = start(models.Plain, config(0, flops_profiler={"enabled": True, "step": 2, "output_file": str(path)}))
        train(engine, 2)
        assert not path.exists()
        train(engine, 1)
        return engine.flops_profiler_profile_step()

    assert run_ranks(1, job) == [2]
    assert "Flops Profiler: step 2" in path.read_text()


def test_several_micro_batches_are_one_profile_of_the_last(tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"
    settings = config(1, flops_profiler=profiling(path), gradient_accumulation_steps=3)

    def job() -> int:
        engine = start(models.Plain, settings)
        train(engine, 2, num_micro=3)
        assert engine.flops_profiler is not None
        return engine.flops_profiler.macs

    assert run_ranks(1, job) == [MACS]
    page = path.read_text()
    assert "one of 3 micro-batches is shown, the last of the step" in page
    assert "FLOPS per GPU = 3 * 3 * fwd flops per GPU / iter latency" in page


def test_recomputed_blocks_count_once_forward_and_show_in_backward(tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"
    recomputing = {"activation_checkpointing": {"modules": ["Block"]}}

    def job(factor: float) -> int:
        settings = config(3, flops_profiler=profiling(path, recompute_fwd_factor=factor), **recomputing)
        engine = start(models.Plain, settings)
        train(engine, 2)
        assert engine.flops_profiler is not None
        return engine.flops_profiler.macs

    assert run_ranks(2, lambda: job(0.0))[0] == MACS
    page = path.read_text()
    counted = 2 + 3 * 12 * 24 * TOKENS / MACS  # each block's first product again; nothing needs its last one's result
    assert re.search(rf"bwd MACs counted / fwd MACs: +{counted:.2f}\n", page)
    assert "bwd FLOPS per GPU = 2 * fwd flops" in page
    assert "3 modules are recomputed in backward, which the FLOPS of backward leave out" in page
    run_ranks(2, lambda: job(1.0))
    page = path.read_text()
    assert "bwd FLOPS per GPU = 3 * fwd flops per GPU / bwd latency" in page
    assert "fwd+bwd FLOPS per GPU = 4 * fwd flops" in page
    assert "recomputed in backward" not in page


def test_a_script_that_calls_backward_itself_has_a_profile_without_it(tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"

    def job() -> None:
        engine = start(models.Plain, config(2, flops_profiler=profiling(path)))
        for index in range(2):
            engine.scale(engine(*batch(index, 0, 1))).backward()
            engine.step()

    run_ranks(1, job)
    assert "backward was not measured: the script calls loss.backward()" in path.read_text()


def test_an_evaluation_in_the_profiled_step_is_not_what_is_counted(tmp_path: Path) -> None:
    def job() -> int:
        engine = start(models.Plain, config(0, flops_profiler=profiling(tmp_path / "profile.txt")))
        train(engine, 1)
        loss = engine(*batch(1, 0, 1))
        with torch.no_grad():
            engine(*(part[:1] for part in batch(2, 0, 1)))
        engine.backward(loss)
        engine.step()
        assert engine.flops_profiler is not None
        return engine.flops_profiler.macs

    assert run_ranks(1, job) == [MACS]


def test_a_step_that_fails_leaves_no_hooks() -> None:
    class Fails(models.Plain):
        has_failed = False

        def body(self, x: torch.Tensor) -> torch.Tensor:
            x = super().body(x)
            if not self.has_failed:
                self.has_failed = True
                raise RuntimeError("in the middle")
            return x

    def job() -> int:
        engine = start(Fails, config(3, flops_profiler=profiling(profile_step=0, detailed=False)))
        before = hooks_of(engine.module)
        with pytest.raises(RuntimeError, match=r"in the middle"):
            engine(*batch(0, engine.global_rank, 2))
        assert hooks_of(engine.module) == before
        train(engine, 1)
        assert engine.flops_profiler is not None
        return engine.flops_profiler.macs

    assert run_ranks(2, job)[0] == MACS


def test_an_engine_without_it_has_plain_timers_and_no_hook_more() -> None:
    def job(settings: dict[str, Any]) -> tuple[type, Any, int]:
        engine = start(models.Plain, settings)
        return type(engine.timers), engine.flops_profiler, sum(map(len, hooks_of(engine.module)))

    without = run_ranks(1, lambda: job(config(3)))[0]
    assert without[:2] == (StepTimers, None)
    between = run_ranks(1, lambda: job(config(3, flops_profiler=profiling())))[0]
    assert between[0] is ProfilingTimers
    assert between[2] == without[2]


def test_bf16_is_counted_alike_and_timers_can_be_on_as_well(tmp_path: Path) -> None:
    settings = config(3, flops_profiler=profiling(tmp_path / "profile.txt"), wall_clock_breakdown=True, **BF16)

    def job() -> tuple[int, set[str]]:
        engine = start(models.Plain, settings)
        train(engine, 2)
        assert engine.flops_profiler is not None
        return engine.flops_profiler.macs, set(engine.timers.last_step)

    assert run_ranks(2, job)[0] == (MACS, {"forward", "backward", "gather", "reduce", "step"})


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 13),
    reason="older torch crashes where it compiles in a thread, as ranks that are threads do",
)
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("stage", [0, 3])
def test_compiled_blocks_are_counted_and_go_on_as_they_were_compiled(stage: int, tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"

    def job(settings: dict[str, Any]) -> tuple[list[float], list[int], shoal.Engine]:
        graphs: list[Any] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            graphs.append(graph)
            return graph.forward

        model = make(models.Plain)
        for block in model.blocks:
            block.compile(backend=backend)
        engine = start_with(model, settings)
        losses, compiled = [], []
        for step in range(5):
            loss = engine(*batch(step, 0, 1))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            compiled.append(len(graphs))
        return losses, compiled, engine

    profile = {"flops_profiler": profiling(path, profile_step=2)}
    ((plain, _, _),) = run_ranks(1, lambda: job(config(stage)))
    ((losses, compiled, engine),) = run_ranks(1, lambda: job(config(stage, **profile)))
    assert losses == plain
    assert compiled[1:] == [compiled[1]] * 4 and compiled[1] > 0
    assert engine.flops_profiler is not None and engine.flops_profiler.macs == MACS
    assert "3 compiled modules ran uncompiled while they were counted" in path.read_text()
