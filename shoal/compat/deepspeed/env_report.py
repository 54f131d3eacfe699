"""``ds_report``: versions, the accelerator, and which operators are available."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from shoal.compat.accelerator import get_accelerator
from shoal.compat.announce import TESTED
from shoal.compat.distribution import alias_version
from shoal.compat.finder import real_deepspeed
from shoal.compat.op_builders import __compatible_ops__
from shoal.text import format_bytes, table


def report() -> str:
    """The whole report."""
    accelerator, real = get_accelerator(), real_deepspeed()
    rows: list[list[object]] = [
        ["deepspeed", f"{alias_version()}, provided by Shoal"],
        ["another DeepSpeed", real.origin if real is not None else "none installed"],
        ["python", f"{platform.python_version()} ({sys.executable})"],
        ["torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"],
        ["accelerator", accelerator.device_name()],
        ["devices", accelerator.device_count()],
        ["device memory", format_bytes(accelerator.total_memory())],
        *_clients(),
    ]
    ops: list[list[object]] = [
        [name, "available" if is_there else "not available"] for name, is_there in __compatible_ops__.items()
    ]
    return table(rows, ["item", "value"]) + "\n\n" + table(ops, ["operator", "in Shoal"]) + "\n"


def _clients() -> list[list[object]]:
    return [[name, f"{_installed(name)} (tested: {tested})"] for name, tested in TESTED.items()]


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Write the report to stdout."""
    text = report()
    sys.stdout.write(text.partition("\n\n")[0] + "\n" if hide_operator_status else text)


def cli_main() -> None:
    main("--hide_operator_status" in sys.argv, "--hide_errors_and_warnings" in sys.argv)


if __name__ == "__main__":
    cli_main()
