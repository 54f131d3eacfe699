"""Documents of tokens by index, in memory."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.data import InMemorySource, TokenSource
from shoal.errors import UsageError


def test_documents_in_memory_are_read_by_index_and_part() -> None:
    source: TokenSource = InMemorySource([[5, 6, 7], [], [8]], name="three")
    assert isinstance(source, TokenSource)
    assert len(source) == 3
    assert source.lengths.tolist() == [3, 0, 1]
    assert source.lengths.dtype == np.int64
    assert [source.tokens(index).tolist() for index in range(3)] == [[5, 6, 7], [], [8]]
    assert source.tokens(0, 1, 2).tolist() == [6]
    assert source.place(2) == ("three", 3)


def test_the_fingerprint_is_of_the_tokens_and_their_documents() -> None:
    first = InMemorySource([[5, 6], [7]]).fingerprint
    assert first == InMemorySource([np.array([5, 6], np.uint16), [7]], name="other").fingerprint
    assert first != InMemorySource([[5], [6, 7]]).fingerprint
    assert first != InMemorySource([[5, 6], [8]]).fingerprint


def test_bad_documents_are_named() -> None:
    with pytest.raises(UsageError, match="empty has no documents"):
        InMemorySource([], name="empty")
    with pytest.raises(UsageError, match=r"document 1 is an array of float64 of shape \(1,\)"):
        InMemorySource([[1], [0.5]])
