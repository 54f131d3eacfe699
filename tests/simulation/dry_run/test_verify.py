"""``shoal.verify``: a step by type. What is right has no finding, and each fault is found where it is made."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app
from shoal.comm import autograd
from shoal.models import GPT, GPTConfig
from shoal.parallel.tensor.region import TensorRegion
from shoal.simulation.verify import TypeReport, verify

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 32, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


PLAN = {"layers.*.up": "column", "layers.*.down": "row", "head": "replicate"}


def typed(
    num_ranks: int = 4, block: Callable[[], nn.Module] = Block, *, stage: int = 1, plan: Any = PLAN, **parallel: Any
) -> TypeReport:
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "parallel": {"tp": 2, "tp_plan": plan, **parallel},
    }

    def train() -> None:
        engine = shoal.initialize(model=Model(block), config=settings)[0]
        tokens = torch.zeros(2, 8, dtype=torch.long)
        engine.backward(engine(tokens, tokens))
        engine.step()
        engine.destroy()

    return verify(train, num_ranks)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("splits_sequence", [False, True])
def test_data_and_tensor_parallel_steps_are_right_by_type(stage: int, splits_sequence: bool) -> None:
    report = typed(stage=stage, tp_sequence_parallel=splits_sequence)
    assert report.findings == []
    assert report.num_operators > 100
    assert report.axes == ["tp", "dp_shard"]
    norm = "replicated, gradient summed" if splits_sequence else "replicated, equal gradient"
    assert report.parameters["layers.0.norm.weight"] == [norm, "replicated, gradient averaged"]
    assert report.parameters["layers.0.up.weight"] == ["sharded (dim 0), own gradient", "replicated, gradient averaged"]
    assert report.parameters["layers.1.down.weight"][0] == "sharded (dim 1), own gradient"


def test_an_input_whose_gradient_is_not_summed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's f is missing: nothing shows it in the forward pass."""
    monkeypatch.setattr(TensorRegion, "copy", lambda region, tensor, label: tensor)
    report = typed()
    faults = [each for each in report.findings if "layers.1.norm.weight" in each.parameters]
    assert [fault.axis for fault in faults] == ["tp"]
    assert "partial" in faults[0].what
    assert "native_layer_norm" in faults[0].operator
    assert "test_verify.py" in faults[0].place


def test_a_sum_that_is_taken_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    once = autograd.all_reduce

    def twice(tensor: torch.Tensor, comm: Any, *, label: str) -> torch.Tensor:
        return once(once(tensor, comm, label=label), comm, label=label)

    monkeypatch.setattr(autograd, "all_reduce", twice)
    found = typed().findings
    assert found[0].axis == "tp"
    assert "counted 2 times" in found[0].what
    assert "layers.0.down out" in found[0].what


class WithoutSum(Block):
    """A row linear of the script's own, which forgets its sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(F.gelu(self.up(self.norm(x))), self.down.weight, self.down.bias)


def test_a_bias_that_is_added_before_the_sum_is_found() -> None:
    found = typed(block=WithoutSum).findings
    assert found[0].axis == "tp"
    assert "addmm of a partial and a replicated tensor" in found[0].what
    assert found[0].parameters == ("layers.0.down.bias", "layers.0.down.weight")
    assert "test_verify.py" in found[0].place
    assert "in forward" in found[0].place


def test_a_norm_of_split_elements_whose_gradient_is_not_summed_is_found() -> None:
    class OfHeads(Block):
        def __init__(self) -> None:
            super().__init__()
            self.head_norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(self.norm(x)).unflatten(-1, (-1, 8))
            return x + self.down(self.head_norm(y).flatten(-2))

    found = typed(block=OfHeads).findings
    assert {name for each in found for name in each.parameters} == {
        f"layers.{layer}.head_norm.{kind}" for layer in (0, 1) for kind in ("weight", "bias")
    }
    assert {each.axis for each in found} == {"tp"}
    assert typed(block=OfHeads, plan={**PLAN, "layers.*.head_norm": "replicate_sum_gradient"}).findings == []


def test_a_gradient_that_is_summed_although_all_ranks_have_it_is_found() -> None:
    found = typed(plan={**PLAN, "layers.*.norm": "replicate_sum_gradient"}).findings
    assert {name.split(".")[2] for each in found for name in each.parameters} == {"norm"}
    assert "counted once for each rank" in found[0].what
    assert "all_reduce 'root#1' of a replicated tensor" in found[1].what  # the same, where it is summed


def test_a_column_where_a_row_is_meant_is_found() -> None:
    found = typed(plan={**PLAN, "layers.*.down": "column"}).findings
    assert [each.axis for each in found] == ["tp"]
    assert "layers.0.down.weight" in found[0].parameters
    assert "sharded (dim 1) (16, 32)" in found[0].what
    assert "test_verify.py" in found[0].place


def test_a_norm_between_layers_that_split_the_sequence_needs_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twelfth error of Megatron-LM's issue 7452, as a fault of the code that reads the plan."""
    from shoal.engine import model_parts

    split = model_parts.split
    monkeypatch.setattr(model_parts, "split", lambda *args: (split(*args)[0], frozenset()))
    found = typed(tp_sequence_parallel=True).findings
    assert {name.split(".", 2)[2] for each in found for name in each.parameters} == {
        "norm.weight", "norm.bias", "down.bias",
    }  # fmt: skip
    assert {each.axis for each in found} == {"tp"}


def test_the_program_of_the_page_prints_what_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "verify.md").read_text(encoding="utf-8")
    program = page.split("```python\n")[1].split("```")[0]
    shown = [re.sub("^    ", "", line) for line in page.splitlines()]
    for text in (program, program.replace('"row"}', '"row", "head_norm": "replicate_sum_gradient"}')):
        (tmp_path / "train.py").write_text(text)
        runpy.run_path(str(tmp_path / "train.py"))
        lines = capsys.readouterr().out.replace(f"{tmp_path}/", "").splitlines()
        assert lines == shown[shown.index(lines[0]) :][: len(lines)]


def small_gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=64, sequence_length=16, num_layers=2, hidden_size=32, num_heads=4))


def test_the_command_reads_a_config_and_a_model(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW"},
        "parallel": {"tp": 2, "pp": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = [str(tmp_path / "config.json"), "--model", f"{__name__}:small_gpt", "--ranks", "4", "--json"]
    result = CliRunner().invoke(app, ["verify", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["findings"] == []
    assert report["parameters"]["blocks.0.attention.out.weight"] == {"tp": "sharded (dim 1), own gradient"}
    assert report["parameters"]["blocks.1.attention_norm.weight"] == {"tp": "replicated, equal gradient"}


def test_the_command_ends_with_1_where_there_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorRegion, "copy", lambda region, tensor, label: tensor)
    (tmp_path / "config.json").write_text(
        json.dumps({"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "parallel": {"tp": 2}})
    )
    arguments = [str(tmp_path / "config.json"), "--model", f"{__name__}:small_gpt", "--ranks", "4"]
    result = CliRunner().invoke(app, ["verify", *arguments], catch_exceptions=False)
    assert result.exit_code == 1
    assert "blocks.1.feed_forward_norm.weight" in result.stdout
