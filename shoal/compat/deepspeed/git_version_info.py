"""``deepspeed.git_version_info``: which version this is."""

from __future__ import annotations

import torch

from shoal.compat.distribution import alias_version
from shoal.compat.op_builders import __compatible_ops__ as compatible_ops

version = alias_version()
git_hash = git_branch = "shoal"
installed_ops = dict(compatible_ops)
torch_info = {
    "version": torch.__version__.partition("+")[0],
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
}

__all__ = ["compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]
