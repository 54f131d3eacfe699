"""What the check of streams reports, as a person would say it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.simulation.accesses import Access
from shoal.text import format_bytes


@dataclass
class StreamFinding:
    """One fault: what, where, and the missing wait. ``count``: how often it came up."""

    text: str
    count: int = 1

    def __str__(self) -> str:
        return self.text + (f"\n  This came up {self.count} times." if self.count > 1 else "")


def race(memory: str, start: int, stop: int, old: Access, was_write: bool, new: Access, is_write: bool) -> str:
    """Two operations of which at least one writes, without an order between them."""
    return (
        f"{memory}, bytes {start} to {stop} ({format_bytes(stop - start)}): "
        f"{_did(new, is_write)} before {_did(old, was_write)} is known to be over."
        f"\n  first:   {_said(old)}\n  then:    {_said(new)}"
        f"\n  missing: {_wait(new.stream.name, old)}, before the second operation."
    )


@dataclass(frozen=True)
class FreedBytes:
    """Memory that was given back to the allocator before an access was known to be over."""

    memory: str
    start: int
    stop: int
    access: Access
    was_write: bool
    how: str
    place: str


def reused(freed: FreedBytes, stream: str, place: str) -> str:
    """Memory that was freed, and that the next allocation may use while another stream still does."""
    access, start, stop = freed.access, freed.start, freed.stop
    return (
        f"{freed.memory}, bytes {start} to {stop} ({format_bytes(stop - start)}): the memory was freed ({freed.how}), "
        f"and {stream} allocates, maybe this memory, before {_did(access, freed.was_write)} is known to be over."
        f"\n  first:   {_said(access)}\n  freed:   at {freed.place}\n  then:    an allocation, at {place}"
        f"\n  missing: {_wait(stream, access)}, before it allocates again; or record_stream."
    )


def _did(access: Access, is_write: bool) -> str:
    return f"{access.name} on {access.stream.name} {'writes' if is_write else 'reads'} it"


def _said(access: Access) -> str:
    return f"{access.name} on {access.stream.name}, at {access.place}"


def _wait(waiting: str, old: Access) -> str:
    return f"{waiting} must wait for {old.stream.name}"
