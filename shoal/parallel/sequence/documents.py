"""The documents that are packed in the rows of a batch: a position attends only to those of its own document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import UsageError


@dataclass(frozen=True)
class Documents:
    """Where the documents of each row of the batch begin, and the length of the row.

    All ranks have the same. Make one for a batch and give it to every layer: then no layer communicates for it.

    >>> Documents.of_lengths([[3, 5], [8]]).begins
    ((0, 3, 8), (0, 8))
    >>> Documents.from_ids(torch.tensor([[7, 7, 2, 2, 2], [1, 1, 1, 1, 1]])).begins
    ((0, 2, 5), (0, 5))
    >>> Documents.from_positions(torch.tensor([[0, 1, 2, 0, 1]])).begins
    ((0, 3, 5),)

    Raises: UsageError: the rows do not have one length.
    """

    begins: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        lengths = {row[-1] for row in self.begins}
        if len(lengths) != 1:
            raise UsageError(
                f"the documents of the rows of a batch have {sorted(lengths)} positions together",
                do="give every row documents of the same number of positions; padding is a document too.",
                code="sequence-documents",
            )

    @property
    def length(self) -> int:
        return self.begins[0][-1]

    @classmethod
    def of_lengths(cls, lengths: Sequence[Sequence[int]]) -> Documents:
        """Documents of these lengths, one list for each row of the batch."""
        begins = []
        for row in lengths:
            sums = [0]
            for length in row:
                sums.append(sums[-1] + length)
            begins.append(tuple(dict.fromkeys(sums)))  # without documents of no length
        return cls(tuple(begins))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> Documents:
        """Cumulative lengths, [number of documents + 1], as variable-length kernels take them: a batch of one row."""
        return cls((tuple(dict.fromkeys(cu_seqlens.tolist())),))

    @classmethod
    def from_ids(cls, ids: Tensor) -> Documents:
        """A number for each position, [B, L] or [L]: a document is a run of equal ones."""
        ids = torch.atleast_2d(ids)
        return cls._from_first(ids[:, 1:] != ids[:, :-1])

    @classmethod
    def from_positions(cls, positions: Tensor) -> Documents:
        """``position_ids``, [B, L] or [L]: where one is not the next of the one before, a document begins."""
        positions = torch.atleast_2d(positions)
        return cls._from_first(positions[:, 1:] != positions[:, :-1] + 1)

    @classmethod
    def of_padding(cls, is_token: Tensor) -> Documents:
        """Rows with padding before or after the tokens, [B, L]: a document of tokens, and documents of padding.

        Raises: UsageError: padding between tokens.
        """
        documents = cls.from_ids(is_token)
        values = is_token.to(torch.int8)
        if bool(((values[:, 1:] - values[:, :-1] == 1).sum(1) + values[:, 0] > 1).any()):
            raise UsageError(
                "a row of attention_mask has padding between tokens",
                do="put padding before or after the tokens, and separate packed documents by position_ids.",
                code="sequence-documents",
            )
        return documents

    @classmethod
    def _from_first(cls, is_first: Tensor) -> Documents:
        """
        Args:
            is_first: [B, L - 1]: does a document begin at this position, from the second on?
        """
        length = is_first.shape[1] + 1
        rows: list[list[int]] = [[0] for _ in range(is_first.shape[0])]
        for row, position in is_first.nonzero().tolist():
            rows[row].append(position + 1)
        return cls(tuple((*row, length) for row in rows))

    def and_of(self, other: Documents) -> Documents:
        """Documents that begin where one of either begins: positions attend where both allow it."""
        rows = max(len(self.begins), len(other.begins))
        pairs = zip(self._of_rows(rows), other._of_rows(rows), strict=True)
        return Documents(tuple(tuple(sorted({*mine, *theirs})) for mine, theirs in pairs))

    def _of_rows(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return self.begins * rows if len(self.begins) == 1 else self.begins
