"""How recomputation is asked for: modules by name, `configure`, the config's section, the how-to page."""

from __future__ import annotations

import copy
import doctest
import gc
import re
import subprocess
import sys
import time
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from shoal.config import load
from shoal.config.schema import ActivationCheckpointing
from shoal.errors import ModelError, NotBuiltError, UsageError
from shoal.parallel import recompute, saved_tensors, segment, selective
from shoal.parallel import recompute_blocks as recompute_blocks_module
from shoal.parallel.recompute import Recompute, RecomputeSettings, recompute_blocks
from shoal.parallel.segment import Times
from tests.helpers.places import ROOT
from tests.helpers.recompute_models import Block, Chain, Mpu, assert_same, inputs, recomputed, run, unconfigure


def test_modules_are_chosen_by_class_name_pattern_or_found() -> None:
    model, made = nn.Sequential(Chain(5), nn.Linear(2, 2)), Recompute()

    def chosen(*args: Any, **kwargs: Any) -> tuple[str, ...]:
        blocks = recompute_blocks(model, *args, recompute=made, **kwargs)
        blocks.remove()
        return blocks.names

    every = tuple(f"0.blocks.{index}" for index in range(5))
    assert chosen() == chosen(Block) == chosen("Block") == chosen("0.blocks.*") == every
    assert chosen(["0.blocks.1", "1"]) == ("0.blocks.1", "1")
    assert chosen("Block", every=2) == ("0.blocks.0", "0.blocks.2", "0.blocks.4")
    assert chosen("Block", every=9) == ("0.blocks.0",)


def test_modules_that_are_not_there_are_an_error() -> None:
    with pytest.raises(ModelError, match=r"'Blok'.*did you mean 'Block'"):
        recompute_blocks(Chain(), "Blok", recompute=Recompute())
    with pytest.raises(ModelError, match="no list of modules of one class"):
        recompute_blocks(nn.Linear(2, 2), recompute=Recompute())
    with pytest.raises(UsageError, match="every = 0"):
        recompute_blocks(Chain(), every=0, recompute=Recompute())


def test_a_deep_copy_recomputes_its_own_modules() -> None:
    model, (x, _) = Chain(), inputs()
    with recomputed(model, RecomputeSettings()) as made:
        copied = copy.deepcopy(model)
        for parameter in copied.parameters():
            parameter.data.mul_(2)
        ours = run(copied, x)
        assert made.num_segments == 4
    plain = Chain()
    plain.load_state_dict(copied.state_dict())
    assert_same(ours, run(plain, x))


def test_remove_restores_forward_also_after_other_code_wrapped_it() -> None:
    model, (x, _) = Chain(1), inputs()
    block = model.blocks[0]
    own = block.forward
    calls = []

    def logged(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append("inner")
        return own(x, *args, **kwargs)

    block.forward = logged
    made = Recompute()
    blocks = recompute_blocks(model, Block, recompute=made)
    run(model, x)
    assert (calls, made.num_segments) == (["inner", "inner"], 1)
    blocks.remove()
    assert block.forward is logged
    again = recompute_blocks(model, Block, recompute=made)
    theirs = block.forward
    block.forward = lambda *args, **kwargs: theirs(*args, **kwargs)
    again.remove()
    run(model, x)
    assert made.num_segments == 1


def test_a_removed_model_is_freed() -> None:
    model = Chain()
    recompute_blocks(model, Block, recompute=Recompute()).remove()
    assert all("forward" not in vars(block) for block in model.blocks)
    ref = weakref.ref(model.blocks[0])
    del model
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("module", [saved_tensors, recompute_blocks_module, segment, selective])
def test_the_examples_in_docstrings_are_right(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 0) == (0, True)


def test_configure_takes_the_section_and_arguments_win(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="shoal")
    unconfigure()  # what an engine of another test may have left
    assert not recompute.is_configured()
    before = recompute.current_recompute()
    try:
        recompute.configure(None, checkpoint_in_cpu=True, num_checkpoints=4, contiguous_checkpointing=True,
                            synchronize=True, partition_activations=True, profile=True)  # fmt: skip
        assert recompute.is_configured()
        assert recompute.current_recompute().settings == RecomputeSettings(
            is_offloaded=True, is_partitioned=True, has_times=True
        )
        told = [record.getMessage().partition(":")[0] for record in caplog.records if record.name == "shoal"]
        assert told == ["partition_activations", "contiguous_checkpointing", "num_checkpoints", "synchronize"]
        recompute.partition_activations_in_checkpoint(False)
        assert recompute.current_recompute().settings == RecomputeSettings(is_offloaded=True, has_times=True)
        x = torch.ones(2, requires_grad=True)
        out = recompute.checkpoint_wrapped(torch.sin)(x)
        assert recompute.current_recompute().saved_bytes == 8
        out.sum().backward()
        assert x.grad is not None
        recompute.non_reentrant_checkpoint(torch.sin, x).sum().backward()
        recompute.set_num_layers(3)
        recompute.reset()
        recompute.configure(Mpu(2, 1))
        assert recompute.current_recompute().settings == RecomputeSettings()
        with pytest.raises(NotBuiltError, match="2 model-parallel ranks"):
            recompute.configure(Mpu(2, 1), partition_activations=True)
    finally:
        unconfigure()
    assert recompute.current_recompute() is before


def test_configure_reads_a_config() -> None:
    config = load({"train_batch_size": 1, "activation_checkpointing": {"number_checkpoints": 2}}, world_size=1)
    try:
        recompute.configure(None, config, profile=True)
        assert recompute.current_recompute().settings == RecomputeSettings(has_times=True)
    finally:
        unconfigure()


def test_settings_follow_from_the_section() -> None:
    section = ActivationCheckpointing(cpu_checkpointing=True, profile=True, partition_activations=True, policy=["mm"])
    assert RecomputeSettings.of(section) == RecomputeSettings(True, True, True, ("aten::mm",))


def test_unused_settings_are_reported() -> None:
    made = Recompute(RecomputeSettings(is_offloaded=True))
    note = made.unused_note()
    assert note is not None and note.startswith("activation_checkpointing is set, but nothing was recomputed")
    made.checkpoint(torch.sin, torch.ones(2, requires_grad=True))
    assert made.unused_note() is None
    assert Recompute().unused_note() is None


def test_a_reentrant_segment_is_refused() -> None:
    with pytest.raises(UsageError, match="recompute-reentrant"):
        recompute.checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=True)
    recompute.checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


def test_torchs_options_reach_torch() -> None:
    x = torch.ones(64, requires_grad=True)
    out = recompute.checkpoint(lambda t: torch.nn.functional.dropout(t.sin()), x, preserve_rng_state=False)
    out.sum().backward()
    assert x.grad is not None
    dropped = out == 0
    assert not torch.equal(dropped, x.grad == 0)  # other random numbers: what the option allows


def test_the_examples_of_the_how_to_page_run() -> None:
    root = ROOT
    text = (root / "docs" / "how-to" / "activation-checkpointing.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.splitlines()[0] == "4227072 bytes wait for backward"
    )  # 4 x [8, 128, 256], and cos and sin, in fp32
    assert "blocks.3" in done.stdout


def test_times_are_stored_by_the_modules_names() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.01)
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            _ = ctx.saved_tensors
            time.sleep(0.03)
            return gradient * 2

    class SlowBlock(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Slow.apply(x).sin()

    model = nn.Sequential(SlowBlock(), SlowBlock())
    made = Recompute(RecomputeSettings(has_times=True))
    recompute_blocks(model, SlowBlock, recompute=made)
    x = torch.ones(2, requires_grad=True)
    model(x).sum().backward()
    model(x).sum().backward()
    times = made.times.take()
    assert list(times) == ["0", "1"]
    for each in times.values():
        assert each.calls == 2
        assert each.forward_seconds >= 0.02
        assert each.recompute_seconds >= 0.02
        assert each.backward_seconds >= 0.06
    assert made.times.take() == {}
    assert Times() == Times(0, 0.0, 0.0, 0.0)
