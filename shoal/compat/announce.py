"""The lines that the first rank logs, once, when ``import deepspeed`` becomes Shoal."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version

from shoal.compat.distribution import alias_version
from shoal.engine.log import logger, make_audible

# The releases that the clients' tests are run with.
TESTED = {
    "accelerate": "1.15",
    "transformers": "5.23",
    "peft": "0.21",
    "trl": "1.16",
    "lightning": "2.6",
    "ray": "2.60",
}


def announce(real: ModuleSpec | None) -> None:
    """Log which ``deepspeed`` is used, and which clients have untested releases.

    Args:
        real: a DeepSpeed that is installed in this environment too.
    """
    beside = f"; the DeepSpeed in {real.origin} is not used" if real is not None and real.origin else ""
    make_audible(None)
    logger.info(f"`deepspeed` is Shoal here, version {alias_version()}{beside}.")
    for line in untested():
        logger.warning(line)


def untested() -> list[str]:
    """A line for each imported client whose release the tests do not run with."""
    lines = []
    for name, tested in TESTED.items():
        if name not in sys.modules:
            continue
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found.split(".")[:2] != tested.split("."):
            lines.append(f"{name} {found} is outside of the tested range, {tested}.*: differences are possible.")
    return lines


def say(line: str) -> None:
    make_audible(None)
    logger.warning(line)
