"""A sequence of tokens split into samples of one length, with the next token as each position's target.

tokens   a b c d e f g h i        sequence_length 4
sample 0 a b c d -> b c d e
sample 1 e f g h -> f g h i
"""

from __future__ import annotations

from torch import Tensor
from torch.utils.data import Dataset

from shoal.errors import UsageError


class PackedTokens(Dataset[tuple[Tensor, Tensor]]):
    """Samples of ``sequence_length`` tokens, back to back; what is left at the end is not used.

    Args:
        tokens: [num_tokens], any integer dtype; not copied.

    Raises: UsageError: fewer tokens than one sample and its last target need.
    """

    def __init__(self, tokens: Tensor, sequence_length: int) -> None:
        self._tokens = tokens
        self._length = sequence_length
        self._num_samples = (tokens.numel() - 1) // sequence_length
        if self._num_samples < 1:
            raise UsageError(
                f"{tokens.numel()} tokens do not fill one sample of {sequence_length} tokens and one target.",
                do="give more text, or shorten the sequences.",
            )

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, [sequence_length] each, int64.

        Raises: IndexError: no such sample.
        """
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        start = index * self._length
        part = self._tokens[start : start + self._length + 1].long()
        return part[:-1], part[1:]


def split(tokens: Tensor, validation_fraction: float, sequence_length: int) -> tuple[PackedTokens, PackedTokens]:
    """Training samples, and validation samples from the run's tail (at least one).

    A tail shares no sentence with what comes before it, which samples drawn at random would.

    Raises: UsageError: the text is too short for one sample of each.
    """
    tail = max(sequence_length + 1, round(tokens.numel() * validation_fraction))
    if tokens.numel() - tail < sequence_length + 1:
        raise UsageError(
            f"{tokens.numel()} tokens are too few for training and validation samples of {sequence_length}.",
            do="give more text, or shorten the sequences.",
        )
    cut = tokens.numel() - tail
    return PackedTokens(tokens[:cut], sequence_length), PackedTokens(tokens[cut:], sequence_length)
