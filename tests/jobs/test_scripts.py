"""A script written for DeepSpeed runs unchanged on two ranks, and its losses are those of PyTorch in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from tests.ranks.comm.test_failures import free_port

pytestmark = pytest.mark.timeout(120)  # launchers and their ranks, some after another
ROOT = Path(shoal.__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "helpers" / "compat_script.py"


def start(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=50, check=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """What the script writes, started by DeepSpeed's own command line with its flags."""
    folder = tmp_path_factory.mktemp("script")
    adamw = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    (folder / "ds.json").write_text(
        json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}, "optimizer": adamw})
    )
    script = [str(SCRIPT), "--deepspeed", "--deepspeed_config", str(folder / "ds.json"), "--out", str(folder / "out")]
    done = start("-m", "shoal", "deepspeed", "--num_gpus", "2", *script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("`deepspeed` is Shoal here") == 1
    written: dict[str, list[float]] = json.loads((folder / "out").read_text())
    return written


def torch_alone(make_optimizer: Callable[[Any], torch.optim.Optimizer], decay: float = 1.0) -> list[float]:
    """The losses of one process with the whole batch."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    optimizer = make_optimizer(model)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= decay
        losses.append(loss.item())
    return losses


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize(
    "case",
    [
        "config file, generator",
        "config optimizer, filter",
        "loss.backward()",
        "DeepSpeedCPUAdam, offload",
        "two engines at a time",
        "zero.Init",
    ],
)
def test_a_script_with_adamw_gives_the_losses_of_one_process(found: dict[str, list[float]], case: str) -> None:
    expected = torch_alone(adamw)
    assert expected[3] < expected[0] * 2 and len(set(expected)) == 4
    assert found[case] == pytest.approx(expected, rel=1e-5)


def test_groups_keep_their_rates(found: dict[str, list[float]]) -> None:
    def make(model: Any) -> torch.optim.Optimizer:
        groups = [{"params": model[0].parameters(), "lr": 5e-2}, {"params": model[2].parameters()}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)

    assert found["config optimizer, groups"] == pytest.approx(torch_alone(make), rel=1e-5)


def test_an_optimizer_of_the_script_is_used(found: dict[str, list[float]]) -> None:
    expected = torch_alone(lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert found["client optimizer"] == pytest.approx(expected, rel=1e-5)


def test_callables_make_the_optimizer_and_the_schedule(found: dict[str, list[float]]) -> None:
    expected = torch_alone(lambda model: torch.optim.SGD(model.parameters(), lr=0.2), decay=0.5)
    assert found["callables"] == pytest.approx(expected, rel=1e-5)
    assert found["callables, rates"] == pytest.approx([0.2 * 0.5**4])


def test_a_module_is_started_as_deepspeeds_launcher_does_with_the_given_port(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(
        "import os, sys, deepspeed\ndeepspeed.init_distributed()\n"
        "print('saw', deepspeed.comm.get_world_size(), os.environ['MASTER_PORT'], sys.argv[1:])\n"
    )
    port = free_port()
    flags = ["--num_gpus", "2", "--master_port", str(port), "--no_local_rank", "--module"]
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "deepspeed", *flags, "my_module", "--a", "b c"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[rank 0] saw 2 {port} ['--a', 'b c']",
        f"[rank 1] saw 2 {port} ['--a', 'b c']",
    ]


def test_shoal_run_installs_the_alias_in_ranks_and_in_another_launchers_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import deepspeed, os\nprint('saw', deepspeed.__version__, os.environ['RANK'])\n")
    version = f"0.19.8+shoal.{shoal.__version__}"
    done = start("-m", "shoal", "run", "--as-deepspeed", "--ranks", "2", str(script))
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] saw {version} {r}" for r in (0, 1)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    torchrun = ("-m", "shoal", "run", "--as-deepspeed", "torchrun", "--master-port", str(free_port()))
    done = start(*torchrun, str(script), PATH=path)
    assert done.stdout.splitlines() == [f"saw {version} 0"], done.stderr
    deepspeed = ("-m", "shoal", "run", "--as-deepspeed", "deepspeed", "--num_gpus", "1", "--no_local_rank")
    done = start(*deepspeed, str(script), PATH=path)
    assert done.stdout.splitlines() == [f"[rank 0] saw {version} 0"], done.stderr
    done = start("-m", "shoal", "run", "--as-deepspeed", "--ranks", "2", "torchrun", str(script), PATH=path)
    assert done.returncode == 2 and "[as-deepspeed-ranks]" in done.stderr
