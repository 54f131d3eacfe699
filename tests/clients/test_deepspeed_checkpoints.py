"""Checkpoints that the real DeepSpeed writes now, at other sizes than the fixtures', read and gone on with in Shoal.
And Shoal's, converted, from which it resumes.

DeepSpeed is looked for in this Python, in ``.venv-bench``, and in the one that SHOAL_DEEPSPEED_PYTHON names.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shoal
from shoal.checkpoint.native import ShoalSource, write_shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.compat.checkpoints.universal import write_deepspeed_universal
from shoal.compat.checkpoints.writing import write_deepspeed
from shoal.engine.engine import Engine
from shoal.parallel.expert.layer import MoE
from tests.fixtures.deepspeed.make import CASES as CONFIGS
from tests.fixtures.deepspeed.make_experts import EXPERT_CASES, WithExperts
from tests.fixtures.deepspeed.model import build_model, groups_of, tokens_of
from tests.helpers.deepspeed_made import MADE, everything, made
from tests.ranks.compat.checkpoints.test_from_deepspeed import go_on
from tests.ranks.compat.checkpoints.test_of_divided_deepspeed import Layout, slices, split_groups
from tests.ranks.compat.checkpoints.test_of_divided_deepspeed import go_on as experts_go_on

ROOT = Path(__file__).resolve().parent.parent.parent
FP32 = "stage2-fp32"
CASES = [
    FP32,
    "stage0-fp32",
    "stage1-bf16",
    "stage2-fp16",
    "stage2-bf16-round-robin",
    "stage3-bf16",
    "stage3-bf16-sub-groups",
]


@pytest.fixture(scope="module")
def python() -> str:
    """A Python with DeepSpeed in it."""
    named = os.environ.get("SHOAL_DEEPSPEED_PYTHON")
    for candidate in [named] if named else [sys.executable, str(ROOT / ".venv-bench" / "bin" / "python")]:
        if not Path(candidate).exists():
            continue
        asked = subprocess.run(
            [candidate, "-c", "import importlib.util as u; print(u.find_spec('deepspeed') is not None)"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if asked.stdout.strip() == "True":
            return candidate
    pytest.skip("DeepSpeed is not installed here; make bench installs it into .venv-bench")


def train(python: str, size: int, out: Path, cases: list[str], what: str = "make") -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--master-port", str(port)]
    done = subprocess.run(
        [*command, "-m", f"tests.fixtures.deepspeed.{what}", str(out), *cases],
        capture_output=True, text=True, timeout=240, check=False, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("size", [1, 3])
def test_deepspeeds_files_equal_the_values_of_its_processes(size: int, python: str, tmp_path: Path) -> None:
    train(python, size, tmp_path, CASES)
    for case in CASES:
        source = DeepSpeedSource(tmp_path / case / "checkpoint")
        held = load_file(tmp_path / case / "held.safetensors")
        names = {f"{kind}/{name}": (kind, name) for kind in source.kinds() for name in source.tensors(kind)}
        assert set(names) - set(held) == {"model/shift"}, case
        assert len(held) == 29, case
        for key, tensor in held.items():
            assert torch.equal(source.read(*names[key]).view(-1), tensor.view(-1)), (case, key)
        assert source.about.counters["global_samples"] == 3 * 3 * size, case
        assert source.about.aliases == {"embed.weight": ("head.weight",)}, case
        assert source.about.notes == [], case
    run = json.loads((tmp_path / FP32 / "run.json").read_text())
    write_shoal(DeepSpeedSource(tmp_path / FP32 / "checkpoint"), tmp_path / "converted")
    for rank, found in enumerate(run_ranks(size, go_on, tmp_path / "converted", "fp32", 3, 3, {}, size)):
        expected = [losses[rank] for losses in run["losses"][3:]]
        assert found["losses"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("size", [1, 3])
def test_a_universal_checkpoint_that_deepspeed_makes_now_goes_on(size: int, python: str, tmp_path: Path) -> None:
    cases = ["stage1-fp32", "stage3-fp32", "stage3-bf16-sub-groups"]
    train(python, size, tmp_path, cases)
    train(python, size, tmp_path, cases, "make_universal")
    for case in cases:
        folder = tmp_path / "unpacked" / case
        with zipfile.ZipFile(tmp_path / case / "universal.zip") as archive:
            archive.extractall(folder)
        held = load_file(tmp_path / case / "held.safetensors")
        source = DeepSpeedSource(folder)
        names = {f"{kind}/{name}": (kind, name) for kind in source.kinds() for name in source.tensors(kind)}
        assert set(names) - set(held) == {"model/shift"}, case
        for key, tensor in held.items():
            assert torch.equal(source.read(*names[key]).view(-1), tensor.view(-1)), (case, key)
    for case in cases[:2]:
        expected = json.loads((tmp_path / case / "run.json").read_text())["losses"][3:]
        found = run_ranks(size, go_on, tmp_path / "unpacked" / case, "fp32", 2, 3, {}, size)
        for rank in range(size):
            assert found[rank]["losses"] == pytest.approx([losses[rank] for losses in expected], abs=1e-5), case
    theirs = json.loads((tmp_path / "stage1-fp32" / "universal.json").read_text())["losses"]
    ours = json.loads((tmp_path / "stage1-fp32" / "run.json").read_text())["losses"][3:]
    assert theirs == [pytest.approx(losses, abs=1e-6) for losses in ours]


WAY_BACK = [
    "stage1-bf16", "stage1-bf16-fp32-gradients", "stage2-fp32", "stage2-fp16", "stage2-bf16-schedule",
    "stage2-bf16-round-robin", "stage3-bf16", "stage3-fp16", "stage3-bf16-sub-groups",
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2])
def test_deepspeed_resumes_what_shoal_saved_with_every_tensor_and_goes_on(
    size: int, python: str, tmp_path: Path
) -> None:
    """DeepSpeed saves, Shoal loads and saves, DeepSpeed resumes from what ``convert`` makes of that."""
    train(python, size, tmp_path, WAY_BACK)
    for case in WAY_BACK:
        run_ranks(size, pass_on, case, tmp_path / case)
        write_deepspeed(ShoalSource(tmp_path / case / "shoal"), tmp_path / case / "converted")
    train(python, size, tmp_path, WAY_BACK, "resume")
    for case in WAY_BACK:
        held, resumed = (load_file(tmp_path / case / f"{name}.safetensors") for name in ("held", "resumed"))
        assert held.keys() == resumed.keys() and len(held) == 29, case
        for key, tensor in held.items():
            assert torch.equal(tensor, resumed[key]), (case, key)
        run, found = (json.loads((tmp_path / case / f"{name}.json").read_text()) for name in ("run", "resumed"))
        bound = 0 if case == FP32 else 4e-3  # two runs of DeepSpeed in 16 bits may differ by rounding
        assert found["losses"] == [pytest.approx(each, abs=bound) for each in run["losses"][3:]], case
        assert found["counters"] == [3, 9 * size, 0], case
        assert found["loss_scale"] == run["loss_scale"], case
        assert found["client_state"] == [2, 1.5, [0, 1, 2]], case
        assert found["rates"] != [1.0, 1.0], case


@pytest.mark.parametrize(
    "cases", [["tp2-stage2", "tp2-stage3"], ["pp2-stage1", "pp2-tied-stage1-bf16", "pp2-tp2-stage1"]]
)
def test_deepspeed_resumes_tensor_and_pipeline_parallel_runs_from_the_universal_format(
    cases: list[str], python: str, tmp_path: Path
) -> None:
    """DeepSpeed's recorded checkpoint becomes Shoal's, then a universal one; what DeepSpeed then saves is the first."""
    for case in cases:
        write_shoal(made(case), tmp_path / case / "shoal")
        config = {
            "zero_optimization": {"stage": int(case[case.index("stage") + 5])},
            "bf16": {"enabled": "bf16" in case},
        }
        rows = [r"\d+\.down\.weight"] if case.startswith("pp2-tp2") else []
        write_deepspeed_universal(
            ShoalSource(tmp_path / case / "shoal"), tmp_path / case / "converted", config=config, row_parallel=rows
        )
    train(python, 4, tmp_path, cases, "resume_universal")
    for case in cases:
        old, new = everything(made(case)), everything(DeepSpeedSource(tmp_path / case / "resumed"))
        assert old.keys() == new.keys() and len(old) > 50, case
        assert [key for key in old if not torch.equal(old[key], new[key])] == [], case
        run = json.loads((MADE / case / "run.json").read_text())
        found = json.loads((tmp_path / case / "resumed.json").read_text())
        # At stage 3 DeepSpeed itself gives all groups the rate of the first.
        assert found["rates"] == ([0.01, 0.01] if "stage3" in case else [0.01, 0.02]), case
        bound = 1e-6 if "stage3" not in case else 2e-2
        assert found["losses"] == [pytest.approx(each, abs=bound) for each in run["losses"][3:]], case
        assert (found["counters"][0], found["epoch"]) == (3, 2), case


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, ["ep1-stage1-fp32", "ep2-stage1-fp32", "ep2-stage2-fp32", "ep2-stage2-bf16"]),
        (4, ["ep2-stage2-fp32-4-ranks"]),
        (4, ["ep2-stage1-fp32-data-first"]),
    ],
)
def test_deepspeed_resumes_models_with_experts_that_shoal_saved(
    size: int, cases: list[str], python: str, tmp_path: Path
) -> None:
    train(python, size, tmp_path, cases, "make_experts")
    for case in cases:
        run_ranks(size, pass_experts_on, case, tmp_path / case)
        config = {"zero_optimization": {}, **EXPERT_CASES[case]}
        write_deepspeed(ShoalSource(tmp_path / case / "shoal"), tmp_path / case / "converted", config=config)
    train(python, size, tmp_path, cases, "resume_experts")
    for case in cases:
        held, resumed = (load_file(tmp_path / case / f"{name}.safetensors") for name in ("held", "resumed"))
        assert held.keys() == resumed.keys() and len(held) == 3 * (10 + 3 * 6) + 2, case
        for key, tensor in held.items():
            assert torch.equal(tensor, resumed[key]), (case, key)
        run, found = (json.loads((tmp_path / case / f"{name}.json").read_text()) for name in ("run", "resumed"))
        bound = 4e-3 if "bf16" in case else 1e-6
        assert found["losses"] == [pytest.approx(each, abs=bound) for each in run["losses"][3:]], case
        assert (found["counters"], found["client_state"]) == ([3, 9 * size, 0], 2), case


@pytest.mark.parametrize("case", ["ep2-tp2-stage1-whole", "ep2-tp2-stage2-split"])
def test_tensor_parallel_runs_with_experts_that_deepspeed_saves_now_go_on(
    case: str, python: str, tmp_path: Path
) -> None:
    train(python, 4, tmp_path, [case], "make_expert_slices")
    held = load_file(tmp_path / case / "held.safetensors")
    found = everything(DeepSpeedSource(tmp_path / case / "checkpoint"))
    assert set(found) - set(held) == {"model/shift"} and len(held) == 3 * (19 + 4 * 6) + 2
    for key, tensor in held.items():
        assert torch.equal(found[key].view(-1), tensor.view(-1)), key
    run = json.loads((tmp_path / case / "run.json").read_text())["losses"][3:]
    for tp, ep_size, stage in ((1, 2, 3), (2, 1, 1)):
        is_split = tp > 1 and "split" in case
        layout = Layout(2, stage, ep_size, tp, has_own_groups=True, is_split=is_split)
        folder = tmp_path / case / "checkpoint"
        for rank, each in enumerate(run_ranks(2, experts_go_on, slices, case, layout, folder)):
            assert each["losses"] == [pytest.approx(losses[rank // tp :: 2 // tp], abs=1e-5) for losses in run]


def pass_experts_on(case: str, folder: Path) -> None:
    """On each rank: load what DeepSpeed saved of a model with experts, and save it again."""
    model = WithExperts(MoE, int(case[2]))
    groups = split_groups([{"name": f"group {index}", **group} for index, group in enumerate(groups_of(model))])
    sections = {"bf16": {"enabled": True}} if "bf16" in case else {}
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0, **sections}
    engine = shoal.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1.0), config=config)[0]
    _, client_state = engine.load_checkpoint(folder / "checkpoint")
    engine.save_checkpoint(folder / "shoal", client_state=client_state)
    engine.destroy()


def pass_on(case: str, folder: Path) -> None:
    """On each rank: load what DeepSpeed saved, and save it again."""
    engine = engine_of(**{"gradient_clipping": 0.0, **CONFIGS[case]})
    _, client_state = engine.load_checkpoint(folder / "checkpoint")
    engine.save_checkpoint(folder / "shoal", client_state={key: client_state[key] for key in ("epoch", "best")})
    engine.destroy()


def engine_of(**config: Any) -> Engine:
    """An engine of other weights and rates than those that it will load."""
    model = build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    given: dict[str, Any] = {"model_parameters": groups_of(model)}
    if "optimizer" not in config:
        given = {"optimizer": torch.optim.AdamW(groups_of(model), lr=1.0)}
    engine: Engine = shoal.initialize(model=model, config={"train_micro_batch_size_per_gpu": 3, **config}, **given)[0]
    return engine


@pytest.mark.parametrize("size", [1, 3])
def test_deepspeed_resumes_on_other_ranks_and_at_another_stage(size: int, python: str, tmp_path: Path) -> None:
    """Two ranks of Shoal at stage 2 have trained; their losses on ``size`` ranks are Shoal's own."""

    def begin(stage: int) -> Engine:
        return engine_of(zero_optimization={"stage": stage}, gradient_clipping=0.0)

    def job() -> None:
        engine = begin(2)
        for step in range(3):
            engine.backward(engine(tokens_of(step, current_world().rank)))
            engine.step()
        best = {"loss": 1.5, "weights": torch.arange(3)}
        engine.save_checkpoint(tmp_path / "shoal", client_state={"epoch": 2, "best": best})
        engine.destroy()

    run_ranks(2, job)
    cases = ["stage1-fp32", "stage2-fp32", "stage3-fp32"]
    for case in cases:
        config = {"zero_optimization": CONFIGS[case]["zero_optimization"]}
        write_deepspeed(ShoalSource(tmp_path / "shoal"), tmp_path / case / "converted", num_ranks=size, config=config)
    train(python, size, tmp_path, cases, "resume")

    def resume() -> list[float]:
        engine, losses = begin(2), list[float]()
        engine.load_checkpoint(tmp_path / "shoal")
        for step in range(3, 6):
            loss = engine(tokens_of(step, current_world().rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses

    ours = run_ranks(size, resume)
    source = ShoalSource(tmp_path / "shoal")
    for case in cases:
        resumed = load_file(tmp_path / case / "resumed.safetensors")
        for key, tensor in resumed.items():
            kind, _, name = key.rpartition("/")
            assert torch.equal(source.read(kind, name).view(-1), tensor.view(-1)), (case, key)
        found = json.loads((tmp_path / case / "resumed.json").read_text())
        assert found["counters"] == [3, 18, 0], case
        expected = [pytest.approx([losses[step] for losses in ours], abs=1e-6) for step in range(3)]
        assert found["losses"] == expected, case
