"""Keys that DeepSpeed does not have: units, memory, debugging, data. A file without them means the same."""

from __future__ import annotations

from typing import Literal

from shoal.config.base import Section, key
from shoal.config.unsupported import with_unsupported


class Units(Section):
    """Modules that are gathered together, by name where the automatic partition does not find them."""

    classes: tuple[str, ...] = key((), "class names of modules that are one unit each")
    names: tuple[str, ...] = key((), "full names of modules that are one unit each")


class OffloadActivation(Section):
    """Saved activations on the host."""

    device: Literal["none", "cpu"] = key("none", "where activations saved for the backward pass are stored")
    bytes: int | None = key(None, "largest number of bytes offloaded in a micro-batch; null: all", ge=0)


@with_unsupported("debug")
class Debug(Section):
    """Checks that cost time."""

    disk_sums: bool = key(
        False, "compute a checksum of each block that is offloaded to a disk, and compare it whenever the block is read"
    )
    check_streams: bool = key(
        False,
        "simulate an accelerator on the CPU from initialize to destroy, and check that its streams wait for each other",
    )


class Data(Section):
    """The position in the training data."""

    stateful: bool = key(True, "save the loader's position in the data in checkpoints")
    seed: int | None = key(None, "seed of the order of samples; null: the launcher's")
