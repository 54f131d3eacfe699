"""Megatron's .bin and .idx, against bytes written by hand from the format's description."""

from __future__ import annotations

import copy
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from shoal.data import TokenFile, TokenFileWriter, TokenSource
from shoal.data.sources.indexed import write_index
from shoal.errors import UsageError

# Three documents: [1, 2, 3 | 4], [], [5 | 6, 7]; 16-bit tokens.
INDEX = (
    b"MMIDIDX\0\0"
    + struct.pack("<Q", 1)
    + struct.pack("<B", 8)
    + struct.pack("<Q", 4)
    + struct.pack("<Q", 4)
    + struct.pack("<4i", 3, 1, 1, 2)
    + struct.pack("<4q", 0, 6, 8, 10)
    + struct.pack("<4q", 0, 2, 2, 4)
)
DATA = struct.pack("<7H", 1, 2, 3, 4, 5, 6, 7)


def by_hand(folder: Path, index: bytes = INDEX, data: bytes = DATA) -> Path:
    (folder / "c.idx").write_bytes(index)
    (folder / "c.bin").write_bytes(data)
    return folder / "c"


@pytest.mark.parametrize("suffix", ["", ".idx", ".bin"])
def test_documents_are_their_sequences(tmp_path: Path, suffix: str) -> None:
    source: TokenSource = TokenFile(f"{by_hand(tmp_path)}{suffix}")
    assert [source.tokens(index).tolist() for index in range(len(source))] == [[1, 2, 3, 4], [], [5, 6, 7]]
    assert source.lengths.tolist() == [4, 0, 3]
    assert source.tokens(2, 1, 2).tolist() == [6]
    assert source.tokens(0, 1).tolist() == [2, 3, 4]
    assert source.place(2) == (str(tmp_path / "c.bin"), 8)
    assert source.name == f"{tmp_path}/c{suffix}"
    assert copy.copy(source).tokens(2).tolist() == [5, 6, 7]


def test_a_prefix_with_a_dot_and_modes_are_read(tmp_path: Path) -> None:
    by_hand(tmp_path, INDEX + bytes(4))
    for name in ("c.idx", "c.bin"):
        (tmp_path / name).rename(tmp_path / f"v1.5_{name}")
    assert TokenFile(tmp_path / "v1.5_c").lengths.tolist() == [4, 0, 3]


def test_documents_in_another_order_than_their_data(tmp_path: Path) -> None:
    at = 9 + 8 + 1 + 16 + 16
    index = INDEX[:at] + struct.pack("<4q", 6, 12, 0, 2) + INDEX[at + 32 :]
    source = TokenFile(by_hand(tmp_path, index))
    assert [source.tokens(each).tolist() for each in range(3)] == [[4, 5, 6, 7], [], [1, 2, 3]]


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_every_integer_dtype_has_its_code(tmp_path: Path, code: int, dtype: str) -> None:
    tokens = np.array([1, 2, 3, 100], dtype)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 1, 2) + struct.pack("<iqqq", 4, 0, 0, 1)
    source = TokenFile(by_hand(tmp_path, index, tokens.tobytes()))
    assert source.tokens(0).tolist() == [1, 2, 3, 100]
    assert source.tokens(0).dtype == np.dtype(dtype)
    assert source.largest_token == 100


@pytest.mark.parametrize(("vocab_size", "code"), [(256, 1), (65_536, 8), (65_537, 4)])
def test_what_is_written_has_the_bytes_of_the_format(tmp_path: Path, vocab_size: int, code: int) -> None:
    with TokenFileWriter(tmp_path / "w", vocab_size=vocab_size) as writer:
        writer.write([1, 2, 3, 4])
        writer.write([5, 6, 7], [0, 3])
    size = {1: 1, 8: 2, 4: 4}[code]
    assert (tmp_path / "w" / "tokens.idx").read_bytes() == (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, 3, 4)
        + struct.pack("<3i", 4, 0, 3)
        + struct.pack("<3q", 0, 4 * size, 4 * size)
        + struct.pack("<4q", 0, 1, 2, 3)
    )
    assert (tmp_path / "w" / "tokens.bin").read_bytes() == struct.pack(f"<7{' BH i'[size]}", 1, 2, 3, 4, 5, 6, 7)
    for path in ("w", "w/tokens", "w/tokens.idx", "w/tokens.bin"):  # the last three without checksums, as Megatron's
        source = TokenFile(tmp_path / path, verify=True)
        assert [source.tokens(index).tolist() for index in range(3)] == [[1, 2, 3, 4], [], [5, 6, 7]]
        assert (source.header is None) == (path != "w")
        assert source.largest_token == 7


def broken_index(**change: int) -> bytes:
    values = {"version": 1, "code": 8, "sequences": 4, "offsets": 4} | change
    return b"MMIDIDX\0\0" + struct.pack("<QBQQ", *values.values()) + INDEX[34:]


@pytest.mark.parametrize(
    ("index", "data", "words"),
    [
        (b"", DATA, r"c.idx is not an index of Megatron's"),
        (INDEX[:20], DATA, r"c.idx is not an index of Megatron's"),
        (b"TNTIDX\0\0" + bytes(60), DATA, r"c.idx is not an index of Megatron's"),
        (broken_index(version=2), DATA, r"version 2 and dtype code 8"),
        (broken_index(code=7), DATA, r"version 1 and dtype code 7"),
        (broken_index(code=77), DATA, r"version 1 and dtype code 77"),
        (INDEX[:-1], DATA, r"c.idx has 113 bytes in place of 114"),
        (broken_index(sequences=2**40), DATA, r"c.idx has 114 bytes in place of"),
        (INDEX, DATA[:-1], r"c.bin has 13 bytes, and its index names 14"),
        (INDEX[:34] + struct.pack("<4i", 3, 1, 1, -2) + INDEX[50:], DATA, r"not ranges of its 4 sequences"),
        (INDEX[:-8] + struct.pack("<q", 3), DATA, r"not ranges of its 4 sequences"),
        (INDEX[:50] + struct.pack("<4q", 0, 8, 8, 10) + INDEX[82:], DATA, r"sequences are not adjacent"),
        (INDEX[:50] + struct.pack("<4q", -2, 4, 8, 10) + INDEX[82:], DATA, r"sequences are not adjacent"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 0, 1) + bytes(8), b"", r"has no documents"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, index: bytes, data: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TokenFile(by_hand(tmp_path, index, data))


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = by_hand(tmp_path)
    os.unlink(f"{path}{suffix}")
    with pytest.raises(UsageError, match=rf"c\{suffix} is missing"):
        TokenFile(path)


def test_changed_tokens_change_the_fingerprint(tmp_path: Path) -> None:
    before = TokenFile(by_hand(tmp_path)).fingerprint
    assert TokenFile(by_hand(tmp_path)).fingerprint == before
    assert TokenFile(by_hand(tmp_path, data=DATA[:-1] + b"\1")).fingerprint != before


def test_negative_tokens_are_named_when_the_file_is_read_whole(tmp_path: Path) -> None:
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 1, 2) + struct.pack("<iqqq", 2, 0, 0, 1)
    path = by_hand(tmp_path, index, struct.pack("<2i", 3, -5))
    TokenFile(path)
    with pytest.raises(UsageError, match=r"c.bin has the token -5"):
        TokenFile(path, verify=True)


def test_a_document_that_is_too_long_for_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a document of 2,147,483,648 tokens, more than 2,147,483,647"):
        write_index(tmp_path / "c.idx", np.dtype("<u2"), np.array([1, 2**31]))
