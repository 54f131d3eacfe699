"""Megatron's .bin and .idx, against bytes written by hand from the format's description."""

from __future__ import annotations

import copy
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from shoal.data import MegatronFile, MegatronWriter, TokenSource
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
    source: TokenSource = MegatronFile(f"{by_hand(tmp_path)}{suffix}")
    assert [source.tokens(index).tolist() for index in range(len(source))] == [[1, 2, 3, 4], [], [5, 6, 7]]
    assert source.lengths.tolist() == [4, 0, 3]
    assert source.tokens(2, 1, 2).tolist() == [6]
    assert source.tokens(0, 1).tolist() == [2, 3, 4]
    assert source.place(2) == (str(tmp_path / "c.bin"), 8)
    assert source.name == str(tmp_path / "c")
    assert copy.copy(source).tokens(2).tolist() == [5, 6, 7]


def test_a_prefix_with_a_dot_and_modes_are_read(tmp_path: Path) -> None:
    by_hand(tmp_path, INDEX + bytes(4))
    for name in ("c.idx", "c.bin"):
        (tmp_path / name).rename(tmp_path / f"v1.5_{name}")
    assert MegatronFile(tmp_path / "v1.5_c").lengths.tolist() == [4, 0, 3]


def test_documents_in_another_order_than_their_data(tmp_path: Path) -> None:
    at = 9 + 8 + 1 + 16 + 16
    index = INDEX[:at] + struct.pack("<4q", 6, 12, 0, 2) + INDEX[at + 32 :]
    source = MegatronFile(by_hand(tmp_path, index))
    assert [source.tokens(each).tolist() for each in range(3)] == [[4, 5, 6, 7], [], [1, 2, 3]]


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_every_integer_dtype_has_its_code(tmp_path: Path, code: int, dtype: str) -> None:
    tokens = np.array([1, 2, 3, 100], dtype)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 1, 2) + struct.pack("<iqqq", 4, 0, 0, 1)
    source = MegatronFile(by_hand(tmp_path, index, tokens.tobytes()))
    assert source.tokens(0).tolist() == [1, 2, 3, 100]
    assert source.tokens(0).dtype == np.dtype(dtype)
    assert source.largest_token == 100


@pytest.mark.parametrize(("vocab_size", "code"), [(65_499, 8), (65_500, 4)])
def test_what_is_written_has_the_bytes_of_the_format(tmp_path: Path, vocab_size: int, code: int) -> None:
    with MegatronWriter(tmp_path / "w", vocab_size=vocab_size) as writer:
        writer.write([1, 2, 3, 4])
        writer.write([5, 6, 7], [0, 3])
    size = 2 if code == 8 else 4
    assert (tmp_path / "w.idx").read_bytes() == (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, 3, 4)
        + struct.pack("<3i", 4, 0, 3)
        + struct.pack("<3q", 0, 4 * size, 4 * size)
        + struct.pack("<4q", 0, 1, 2, 3)
    )
    assert (tmp_path / "w.bin").read_bytes() == struct.pack("<7H" if code == 8 else "<7i", 1, 2, 3, 4, 5, 6, 7)
    source = MegatronFile(tmp_path / "w")
    assert [source.tokens(index).tolist() for index in range(3)] == [[1, 2, 3, 4], [], [5, 6, 7]]
    assert sorted(os.listdir(tmp_path)) == ["w.bin", "w.idx"]


def broken_index(**change: int) -> bytes:
    values = {"version": 1, "code": 8, "sequences": 4, "offsets": 4} | change
    return b"MMIDIDX\0\0" + struct.pack("<QBQQ", *values.values()) + INDEX[34:]


@pytest.mark.parametrize(
    ("index", "data", "words"),
    [
        (b"", DATA, r"c.idx is not an index of Megatron's"),
        (INDEX[:20], DATA, r"c.idx is not an index of Megatron's"),
        (b"TNTIDX\0\0" + bytes(60), DATA, r"c.idx has the format before MMIDIDX"),
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
        MegatronFile(by_hand(tmp_path, index, data))


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = by_hand(tmp_path)
    os.unlink(f"{path}{suffix}")
    with pytest.raises(UsageError, match=rf"c\{suffix} is missing"):
        MegatronFile(path)


def test_changed_tokens_change_the_fingerprint(tmp_path: Path) -> None:
    before = MegatronFile(by_hand(tmp_path)).fingerprint
    assert MegatronFile(by_hand(tmp_path)).fingerprint == before
    assert MegatronFile(by_hand(tmp_path, data=DATA[:-1] + b"\1")).fingerprint != before


def test_an_exception_or_bad_tokens_leave_no_file(tmp_path: Path) -> None:
    def broken() -> None:
        with MegatronWriter(tmp_path / "w", vocab_size=9) as writer:
            writer.write([3])
            writer.write([3, 4, 9, 5], [1, 3])

    with pytest.raises(UsageError, match="token 9 in document 2 is outside of the vocabulary, 0 to 8"):
        broken()
    with pytest.raises(UsageError, match="no documents"), MegatronWriter(tmp_path / "w", vocab_size=9):
        pass
    assert os.listdir(tmp_path) == []


def test_files_are_replaced_only_when_asked_for(tmp_path: Path) -> None:
    by_hand(tmp_path)
    with pytest.raises(UsageError, match=r"c.bin exists"):
        MegatronWriter(tmp_path / "c", vocab_size=9)
    with MegatronWriter(tmp_path / "c", vocab_size=9, overwrite=True) as writer:
        writer.write([3])
    assert MegatronFile(tmp_path / "c").tokens(0).tolist() == [3]
