"""What a job prints: a good start at most 4 lines, a typo at most 8, a failed rank's error a screen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch, shoal
from torch import nn
from shoal.comm.world import current_world

class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = Deep(depth - 1) if depth else nn.Linear(8, 8)
    def forward(self, x):
        if isinstance(self.inner, nn.Linear) and current_world().rank == FAILS:
            raise ValueError("a bad sample")
        return self.inner(x)

zero = {"stage": 3, KEY: {"device": "cpu"}}
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
          "gradient_clipping": 1.0, "zero_optimization": zero}
engine = shoal.initialize(model=Deep(30), config=config)[0]
for _ in range(3):
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
print("trained")
engine.destroy()
"""
SCREEN = 24


def printed(folder: Path, *, fails: int = -1, key: str = "offload_optimizer") -> list[str]:
    """The lines of a job of two ranks. Args: ``fails``: the rank that raises; ``key``: of the configuration."""
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("FAILS", str(fails)).replace("KEY", repr(key)))
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", str(script)]
    job = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    lines = job.stdout.rstrip().splitlines()
    assert (job.returncode != 0) == (fails >= 0 or key != "offload_optimizer"), job.stdout
    return lines


def test_a_good_start_prints_at_most_4_lines(tmp_path: Path) -> None:
    lines = printed(tmp_path)
    own = [line for line in lines if not line.endswith("trained")]
    assert len(lines) - len(own) == 2  # one of each rank
    assert 1 <= len(own) <= 4, own


def test_a_typo_prints_at_most_8_lines(tmp_path: Path) -> None:
    lines = printed(tmp_path, key="offload_optimiser")
    assert "did you mean 'offload_optimizer'" in "\n".join(lines)
    assert len(lines) <= 8, lines


def test_an_error_deep_in_a_model_fits_a_screen_with_its_ends(tmp_path: Path) -> None:
    lines = printed(tmp_path, fails=1)
    report = lines[lines.index("shoal: rank 1 failed first: it ended with exit code 1.") :]
    assert len(report) <= SCREEN
    assert report[-2:] == ['    raise ValueError("a bad sample")', "ValueError: a bad sample"]
    assert "    engine.backward(engine(torch.ones(2, 8)).sum())" in report
    assert sum("frames; SHOAL_TRACEBACK=1" in line for line in report) == 1
