"""The processor: its cores, and which 16-bit formats it has instructions for. PyTorch emulates the others, slowly."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

Format = Literal["bf16", "fp16"]

CPUINFO = Path("/proc/cpuinfo")
# A format is native where the processor has one of these flags, as Linux names them: x86, then 64-bit ARM.
NATIVE: Mapping[str, Mapping[Format, frozenset[str]]] = {
    "flags": {"bf16": frozenset({"avx512_bf16", "amx_bf16"}), "fp16": frozenset({"avx512_fp16", "amx_fp16"})},
    "Features": {"bf16": frozenset({"bf16"}), "fp16": frozenset({"asimdhp"})},
}


def num_cores() -> int:
    """CPUs that this process may use; where the system binds no processes to CPUs, those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_instructions_for(format: Format, cpuinfo: Path | None = None) -> bool | None:
    """True if the processor multiplies matrices of this format natively. None: the platform does not say.

    Args:
        cpuinfo: the file that lists its flags; None: Linux's.
    """
    try:
        lines = (cpuinfo or CPUINFO).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if (native := NATIVE.get(name.strip())) is not None:
            return not native[format].isdisjoint(value.split())
    return None


def emulation_notes(formats: Iterable[Format], cpuinfo: Path | None = None) -> list[str]:
    """A line for each format that this processor computes without instructions for it."""
    return [
        f"{name}: this processor has no {name} instructions, so PyTorch emulates them on CPU ranks: a matrix product"
        " can take 50 times as long as in fp32. Use fp32 here, or a GPU."
        for name in formats
        if has_instructions_for(name, cpuinfo) is False
    ]
