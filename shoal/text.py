"""Plain text for people: names near a misspelt one, sizes and counts, tables."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

MAX_TRACEBACK_CHARACTERS = 16_000


def nearest(name: str, candidates: Iterable[str], limit: int = 3, cutoff: float = 0.6) -> list[str]:
    """The candidates most like ``name``, the likest first; upper and lower case are one.

    >>> nearest("gradient_clipp1ng", ["gradient_clipping", "steps_per_print"])
    ['gradient_clipping']
    """
    by_folded: dict[str, str] = {}
    for candidate in candidates:
        by_folded.setdefault(candidate.casefold(), candidate)
    matches = difflib.get_close_matches(name.strip().casefold(), by_folded, n=limit, cutoff=cutoff)
    return [by_folded[folded] for folded in matches]


def did_you_mean(name: str, candidates: Iterable[str], limit: int = 3) -> str:
    """A clause to put at the end of a sentence, or nothing where no candidate is near.

    >>> did_you_mean("Blok", ["Block", "Embedding"])
    "; did you mean 'Block'?"
    """
    matches = nearest(name, candidates, limit)
    if not matches:
        return ""
    return f"; did you mean {' or '.join(repr(candidate) for candidate in matches)}?"


def format_bytes(num_bytes: float) -> str:
    """Bytes in powers of 1,024.

    >>> format_bytes(512), format_bytes(3 * 1024**3 // 2), format_bytes(-2048)
    ('512 B', '1.5 GiB', '-2 KiB')
    """
    size, sign = abs(num_bytes), "-" if num_bytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1023.95:
            return f"{sign}{_short(size)} {unit}"
        size /= 1024
    return f"{sign}{_short(size)} PiB"


def parse_bytes(text: str) -> int | None:
    """A number of bytes as people write it, with a unit; None: it is none.

    >>> parse_bytes("1.5 GiB"), parse_bytes("40GB"), parse_bytes("512B"), parse_bytes("512"), parse_bytes("much")
    (1610612736, 40000000000, 512, None, None)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)\s*", text, re.IGNORECASE)
    if match is None:
        return None
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index((match[2] or " ").upper()))


def version_numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, without what is local.

    >>> version_numbers("2.10.0+cu128"), version_numbers("0.3")
    ((2, 10, 0), (0, 3))
    """
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(3725.4), format_duration(0.2)
    ('1 h 2 min 5 s', '0 s')
    """
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (left, "s")]
    return " ".join(f"{value} {unit}" for value, unit in parts if value) or "0 s"


def format_count(count: float) -> str:
    """A count in powers of 1,000.

    >>> format_count(999), format_count(1_558_000_000), format_count(34_100_000)
    ('999', '1.6 B', '34.1 M')
    """
    size, sign = abs(count), "-" if count < 0 else ""
    for unit in ("", " k", " M", " B"):
        if size < 999.95:
            return f"{sign}{_short(size)}{unit}"
        size /= 1000
    return f"{sign}{_short(size)} T"


def _short(size: float) -> str:
    return f"{size:.1f}".removesuffix(".0")


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun.

    >>> counted(1, "rank"), counted(1200, "rank"), counted(2, "batch", "batches")
    ('1 rank', '1,200 ranks', '2 batches')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def clip(text: str) -> str:
    """The end of a long traceback."""
    if len(text) <= MAX_TRACEBACK_CHARACTERS:
        return text
    return "... (cut)\n" + text[-MAX_TRACEBACK_CHARACTERS:]


def listed(names: Iterable[object], most: int = 10) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    texts = list(map(str, names))
    return ", ".join(texts[:most]) + (f" and {len(texts) - most:,} more" if len(texts) > most else "")


def listed_ranks(ranks: Sequence[int]) -> str:
    """
    >>> listed_ranks([0, 1, 2, 3]), listed_ranks([0, 2]), listed_ranks([0, 2, 3]), listed_ranks([5])
    ('0 to 3', '0 and 2', '0, 2 and 3', '5')
    """
    if len(ranks) == 1:
        return str(ranks[0])
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """Rows under headers, in columns; columns that hold only numbers stand to the right.

    >>> print(table([["blocks", 12], ["head", 3]], ["unit", "count"]))
    unit    count
    ------  -----
    blocks     12
    head        3
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max([len(header), *(len(row[i]) for row in cells)]) for i, header in enumerate(headers)]
    to_right = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, to_right, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(list(headers)), "  ".join("-" * width for width in widths), *map(line, cells)])


def _is_number(cell: str) -> bool:
    return bool(cell) and cell.replace(",", "").replace(".", "", 1).lstrip("-").isdecimal()
