"""A rank that raises, returns early or runs out of memory: every rank's error says where; ranks recover if possible."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import CommError, OutOfMemoryError, RankFailedError, ShoalError
from shoal.text import format_bytes
from tests.helpers.composition import settings_of
from tests.helpers.composition_runs import Model
from tests.helpers.models import Plain
from tests.helpers.training import STAGES, are_bit_equal, batch, config, finish, run_steps, start


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("a bad sample in backward")


def raise_on_rank_1(stage: int, phase: str, style: str) -> tuple[list[Any], float]:
    """Train on three ranks until rank 1 raises in the middle of ``phase``.

    Returns: what each rank saw, and after how many seconds.
    """
    seen: list[Any] = [None] * 3
    began = time.monotonic()

    def job() -> None:
        rank = current_world().rank
        try:
            engine = start(Plain, config(stage))
            run_steps(engine, 2)
            if rank == 1 and phase == "backward":
                engine.module.blocks[1].register_forward_hook(lambda module, args, output: Raises.apply(output))
            elif rank == 1:
                engine.module.blocks[1].register_forward_pre_hook(lambda module, args: 1 / 0)
            run_steps(engine, 2, first=2, style=style)
        except BaseException as error:
            seen[rank] = error
            raise

    with pytest.raises((ValueError, ZeroDivisionError)):
        run_ranks(3, job)
    return seen, time.monotonic() - began


@pytest.mark.parametrize("style", ["engine", "plain"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_raises_in_the_middle_stops_all_with_its_traceback(stage: int, phase: str, style: str) -> None:
    seen, seconds = raise_on_rank_1(stage, phase, style)
    assert isinstance(seen[1], ValueError if phase == "backward" else ZeroDivisionError)
    for rank in (0, 2):
        assert isinstance(seen[rank], RankFailedError)
        assert seen[rank].failed_rank == 1
        assert ("a bad sample in backward" if phase == "backward" else "1 / 0") in seen[rank].remote_traceback
    assert seconds < 20


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_after_an_error_that_all_ranks_caught_training_goes_on_as_if_nothing_had_been(stage: int, world: int) -> None:
    def job(fails: bool) -> tuple[dict[str, torch.Tensor], set[str]]:
        engine = start(Plain, config(stage))
        run_steps(engine, 2)
        if fails:
            rank = current_world().rank
            for phase in ("forward", "backward"):
                block = engine.module.blocks[1]
                if phase == "forward":
                    handle = block.register_forward_hook(lambda module, args, output: 1 / 0)
                else:
                    handle = block.register_forward_hook(lambda module, args, output: Raises.apply(output))
                with pytest.raises((ZeroDivisionError, ValueError)):
                    engine.backward(engine(*batch(7, rank, world)))
                handle.remove()
        states = {unit.state.value for unit in engine.sharded.sharded}
        run_steps(engine, 3, first=2)
        return finish(engine, []).parameters, states

    plain, failed = run_ranks(world, job, False), run_ranks(world, job, True)
    for (expected, _), (parameters, states) in zip(plain, failed, strict=True):
        assert states <= {"SHARDED"}
        assert are_bit_equal(parameters, expected)


def test_an_error_inside_gathered_parameters_leaves_every_unit_sharded() -> None:
    def job() -> list[tuple[str, int]]:
        engine = start(Plain, config(3))
        run_steps(engine, 1)
        handle = engine.module.blocks[1].register_forward_hook(lambda module, args, output: 1 / 0)
        with pytest.raises(ZeroDivisionError), shoal.zero.GatheredParameters(engine.module.blocks[0].parameters()):
            engine(*batch(1, 0, 1))
        handle.remove()
        run_steps(engine, 2, first=1)
        states = [(unit.state.value, unit.pin_count) for unit in engine.sharded.sharded]
        engine.destroy()
        return states

    for states in run_ranks(2, job):
        assert states == [("SHARDED", 0)] * 4


class TooLarge(Plain):
    is_too_large = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_too_large:
            torch.empty(1 << 62, dtype=torch.uint8)
        return super().body(x)


@pytest.mark.parametrize("stage", STAGES)
def test_an_out_of_memory_error_comes_with_the_ledger_and_the_change_that_saves_most(stage: int) -> None:
    def job() -> OutOfMemoryError:
        engine = start(TooLarge, config(stage))
        run_steps(engine, 1)
        engine.module.is_too_large = True
        with pytest.raises(OutOfMemoryError) as caught:
            engine(*batch(1, 0, 1))
        engine.module.is_too_large = False
        run_steps(engine, 1, first=1)
        engine.destroy()
        return caught.value

    for error in run_ranks(2, job):
        assert "no memory left in forward" in error.what
        assert "bytes per parameter" in error.what
        assert "DefaultCPUAllocator" in error.what
        assert "step 1" in error.where
        assert isinstance(error.__cause__, RuntimeError)
        # On CPU everything in the process counts, so for a model this small other memory saves most.
        assert 'halve "train_micro_batch_size_per_gpu" (2)' in error.do


def test_what_uses_the_memory_is_written_and_the_error_names_three_changes(tmp_path: Path) -> None:
    def job() -> OutOfMemoryError:
        engine = start(TooLarge, {**config(1), "debug": {"out_of_memory_folder": str(tmp_path)}})
        run_steps(engine, 1)
        engine.module.is_too_large = True
        with pytest.raises(OutOfMemoryError) as caught:
            engine(*batch(1, 0, 1))
        engine.destroy()
        return caught.value

    for rank, error in enumerate(run_ranks(2, job)):
        path = tmp_path / f"out-of-memory-rank{rank}.json"
        assert f"what used it: {path}" in error.what
        content = json.loads(path.read_text())
        assert content["phase"] == "forward" and content["step"] == 1
        assert "DefaultCPUAllocator" in content["error"]
        assert content["ledger"]["held"] == sum(entry["nbytes"] for entry in content["entries"]) > 0
        sizes = [entry["nbytes"] for entry in content["entries"]]
        assert sizes == sorted(sizes, reverse=True)
        assert content["tensors"][0]["bytes"] >= max(sizes)  # the flat buffers are among them
        assert error.do.count(" Or ") == 2
        for key in ("train_micro_batch_size_per_gpu", '{"stage": 3}: it would save', "activation_checkpointing"):
            assert key in error.do


class TooLargeLayer(nn.Linear):
    is_too_large = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_too_large:
            torch.empty(1 << 62, dtype=torch.uint8)
        return super().forward(x)


@pytest.mark.parametrize(
    ("stage", "sections", "saved", "absent"),
    [
        (1, {}, 3, "offload_"),
        (0, {"pipeline": {"activation_checkpoint_interval": 1}}, 3, "activation_checkpointing"),
        (1, {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, 3, "offload_"),
    ],
)
def test_a_pipeline_stage_without_memory_says_what_would_help_it_and_leaves_a_file(
    stage: int, sections: dict[str, Any], saved: int, absent: str, tmp_path: Path
) -> None:
    """Two stages of two ranks; the ranks of the second one run out of memory."""

    def job() -> str:
        torch.manual_seed(0)
        layers = [shoal.LayerSpec(TooLargeLayer, 8, 8) for _ in range(2)]
        model = shoal.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "parallel": {"pp": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": stage},
            "debug": {"out_of_memory_folder": str(tmp_path)}, "log_level": "error", **sections,
        }  # fmt: skip
        engine = shoal.initialize(model=model, config=settings)[0]
        batches = [(torch.ones(2, 8), torch.zeros(2, 8))] * 2
        engine.train_batch(iter(batches))
        for layer in engine.module.modules():
            layer.is_too_large = current_world().rank >= 2
        with pytest.raises(ShoalError) as caught:
            engine.train_batch(iter(batches))
        assert isinstance(caught.value, OutOfMemoryError) is (current_world().rank >= 2)
        engine.destroy()
        return str(caught.value)

    texts = run_ranks(4, job)
    kinds = {1: ("master", "optimizer state"), 2: ("gradient",), 3: ("parameter",)}
    for rank in (2, 3):
        content = json.loads((tmp_path / f"out-of-memory-rank{rank}.json").read_text())
        replicated = [kind for level in range(stage + 1, 4) for kind in kinds[level]]
        nbytes = sum(each["nbytes"] for each in content["entries"] if each["kind"] in replicated) // 2
        assert content["phase"] == "train_batch()" and nbytes > 0
        assert f'set "zero_optimization": {{"stage": {saved}}}: it would save {format_bytes(nbytes)}' in texts[rank]
        assert 'halve "train_micro_batch_size_per_gpu" (2)' in texts[rank] and absent not in texts[rank]
    assert not (tmp_path / "out-of-memory-rank0.json").exists()
    assert all("DefaultCPUAllocator" in text for text in texts)


def test_what_a_higher_stage_would_save_counts_experts_by_their_own_ranks() -> None:
    """Experts over all ranks of the axis have no copies that a stage could divide."""

    def job(experts: str) -> tuple[int, int]:
        config, run = settings_of({"ranks": "2", "stage": "0", "experts": experts})
        engine = shoal.initialize(model=Model(run), config={**config, "optimizer": {"type": "AdamW"}})[0]
        entries = engine.memory_report().entries
        engine.destroy()
        return tuple(sum(e.nbytes for e in entries if e.kind == "parameter" and e.copies == n) for n in (1, 2))  # type: ignore[return-value]

    (whole_of_one, copied), (own, others) = run_ranks(2, job, "ep 1")[0], run_ranks(2, job, "ep 2")[0]
    assert whole_of_one == 0 and own > 0 and others > 0
    assert 0 <= others + 2 * own - copied < copied / 32  # padding


def test_a_destroyed_engine_gives_the_model_back_whole_and_without_hooks() -> None:
    def job(stage: int) -> tuple[float, float, int]:
        engine = start(Plain, config(stage))
        run_steps(engine, 2)
        model = engine.module
        with torch.no_grad():
            last = float(engine(*batch(5, 0, 1)))
        engine.destroy()
        hooks = sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            for module in model.modules()
        )
        loss = model(*batch(5, 0, 1))
        loss.backward()
        assert all(p.grad is not None for name, p in model.named_parameters() if "unused" not in name)
        return last, float(loss.detach()), hooks

    for stage in STAGES:
        for last, now, hooks in run_ranks(2, job, stage):
            assert last == now
            assert hooks == 0


def test_one_rank_that_leaves_early_is_named_by_the_others() -> None:
    def job() -> None:
        engine = start(Plain, config(3))
        run_steps(engine, 1 if current_world().rank == 1 else 2)

    with pytest.raises(CommError, match="rank 1"):
        run_ranks(2, job)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_leaves_zero_at_zero_and_turns_no_sign(stage: int) -> None:
    """Gradients of zero have a norm of zero; large ones are scaled down, each by the same positive factor."""

    def job(factor: float) -> tuple[float | None, dict[str, torch.Tensor]]:
        engine = start(Plain, config(stage, gradient_clipping=0.5), plain_sgd)
        before = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.backward(engine(*batch(0, current_world().rank, 2)) * factor)
        engine.step()
        after = engine.module_state_dict()
        steps = {name: before[name] - value for name, value in after.items()}
        norm = engine.get_global_grad_norm()
        engine.destroy()
        return norm, steps

    zero_norm, zero_steps = run_ranks(2, job, 0.0)[0]
    assert zero_norm == 0.0
    assert all(not step.any() for step in zero_steps.values())
    _, small = run_ranks(2, job, 1.0)[0]
    norm, large = run_ranks(2, job, 100.0)[0]
    assert norm is not None
    assert norm > 50.0
    for name, step in large.items():
        assert (step * small[name] >= 0).all(), name
    del large["head.weight"]  # the embedding's
    assert float(torch.stack([step.square().sum() for step in large.values()]).sum().sqrt()) == pytest.approx(0.5, 1e-3)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


class PrintsOnRank0(Plain):
    """Rank 0 alone reads a weight between two blocks: of a block that has run, of the next, or of a later one."""

    read = 0

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if current_world().rank == 0:
            float(self.blocks[self.read].up.weight.detach().sum())
        return self.blocks[2](self.blocks[1](x))


@pytest.mark.parametrize("read", [0, 1, 2])
def test_a_rank_that_reads_a_sharded_parameter_alone_is_told_to_gather_it_on_every_rank(
    read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrintsOnRank0, "read", read)

    def job() -> str:
        engine = start(PrintsOnRank0, config(3))
        with pytest.raises(CommError) as caught:
            engine.backward(engine(*batch(0, current_world().rank, 2)))
        assert caught.value.code == "comm-mismatch"
        with pytest.raises(CommError):  # it would gather
            engine.destroy()
        return "".join(caught.value.__notes__)

    reading, other = run_ranks(2, job)
    assert f"On this rank 'root' has read parameters of unit 'blocks.{read}'." in reading
    assert "On this rank" not in other
    for note in (reading, other):
        assert "with shoal.zero.GatheredParameters([p]):" in note


class HangsOnRank1(Plain):
    """From the third forward on, rank 1 waits for an event in a block's forward or backward."""

    place = "forward"
    may_end: threading.Event

    def __init__(self) -> None:
        super().__init__(num_blocks=8)
        self.num_forwards = 0

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 3 and self.num_forwards == 3 and current_world().rank == 1:
                if self.place == "backward":
                    x.register_hook(lambda _: self.hang())
                else:
                    self.hang()
        return x

    def hang(self) -> None:
        assert self.may_end.wait(30)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_error_of_a_hang_comes_after_one_timeout_however_many_units_are_under_way(
    place: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HangsOnRank1, "place", place)
    monkeypatch.setattr(HangsOnRank1, "may_end", threading.Event(), raising=False)
    waited: list[tuple[str, float, float]] = []

    def job() -> None:
        engine = start(HangsOnRank1, config(3, gradient_accumulation_steps=accumulation))
        began = ended = time.monotonic()
        try:
            for index in range(4):
                began = time.monotonic()
                engine.backward(engine(*batch(index, current_world().rank, 2)))
                engine.step()
        except CommError as error:
            ended = time.monotonic()
            with pytest.raises(CommError):  # it would gather
                engine.destroy()
            if current_world().rank == 0:
                waited.append((error.code, ended - began, time.monotonic() - ended))
        finally:
            HangsOnRank1.may_end.set()

    run_ranks(2, job, wait_timeout=1.0)
    ((code, seconds, destroying),) = waited
    assert code == "comm-timeout"
    assert 0.9 <= seconds < 6.0  # one after the other the units under way would take 8
    assert destroying < 3.0
