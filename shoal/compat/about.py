"""Which ``deepspeed`` this is: the versions, the first rank's lines about the import, and ``ds_report``."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import torch

from shoal.compat.accelerator import get_accelerator
from shoal.compat.distribution import alias_version, real_deepspeed
from shoal.compat.op_builders import __compatible_ops__
from shoal.engine.log import logger, make_audible
from shoal.text import format_bytes, table

version = alias_version()
version_major, version_minor, version_patch = (int(part) for part in version.partition("+")[0].split("."))
git_hash = git_branch = "shoal"
installed_ops = dict(__compatible_ops__)
torch_info = {
    "version": torch.__version__.partition("+")[0],
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
}

# The releases that the clients' tests are run with.
TESTED = {
    "accelerate": "1.15",
    "transformers": "5.23",
    "peft": "0.21",
    "trl": "1.16",
    "lightning": "2.6",
    "ray": "2.60",
}


def announce() -> None:
    """Log which ``deepspeed`` is used, and which clients have untested releases."""
    real = real_deepspeed()
    unused = f"; the DeepSpeed in {real.origin} is not used" if real is not None and real.origin else ""
    make_audible(None)
    logger.info(f"`deepspeed` is Shoal here, version {version}{unused}.")
    for line in untested():
        logger.warning(line)


def untested() -> list[str]:
    """A line for each imported client whose release the tests do not run with."""
    installed = {name: _installed(name) for name in TESTED if name in sys.modules}
    return [
        f"{name} {release} is outside of the tested range, {TESTED[name]}.*: differences are possible."
        for name, release in installed.items()
        if release is not None and release.split(".")[:2] != TESTED[name].split(".")
    ]


def _installed(name: str) -> str | None:
    try:
        return version_of(name)
    except PackageNotFoundError:
        return None


def report() -> str:
    """The whole report."""
    accelerator, real = get_accelerator(), real_deepspeed()
    rows: list[list[object]] = [
        ["deepspeed", f"{version}, provided by Shoal"],
        ["another DeepSpeed", real.origin if real is not None else "none installed"],
        ["python", f"{platform.python_version()} ({sys.executable})"],
        ["torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"],
        ["accelerator", accelerator.device_name()],
        ["devices", accelerator.device_count()],
        ["device memory", format_bytes(accelerator.total_memory())],
    ]
    rows += [[name, f"{_installed(name) or 'not installed'} (tested: {tested})"] for name, tested in TESTED.items()]
    ops: list[list[object]] = [
        [name, "available" if is_there else "not available"] for name, is_there in __compatible_ops__.items()
    ]
    return table(rows, ["item", "value"]) + "\n\n" + table(ops, ["operator", "in Shoal"]) + "\n"


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Write the report to stdout."""
    text = report()
    sys.stdout.write(text.partition("\n\n")[0] + "\n" if hide_operator_status else text)


def cli_main() -> None:
    main("--hide_operator_status" in sys.argv, "--hide_errors_and_warnings" in sys.argv)
