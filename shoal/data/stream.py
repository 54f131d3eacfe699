"""Samples of one length from documents of tokens: a function of the position, and of nothing that was read before.

    position --blend--> source, number --order of (seed, epoch)--> packed sample --index--> pieces --source--> tokens

Each source is packed once, in an order of its documents that the seed gives; each epoch has another order of its
samples. So whichever rank or worker reads a position gets the same tokens, and a resumed run needs only the position.

    concatenate   tokens  a a a a b b b .    targets  a a a - b b - -    positions  0 1 2 3 0 1 2 0
    others        tokens  a a a b b . . .    targets  a a a b b - - -    positions  0 1 2 0 1 0 1 2

Here documents have 4 and 3 tokens; padding is one more. Every token but a document's first is a target once. The last
token of a document has no target (-100): only ``concatenate`` gives it a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shoal.data.blend import Blend, WeightChange
from shoal.data.order import Indices, shuffled
from shoal.data.packing import PackedIndex, Packing, pack
from shoal.data.sources.source import InMemorySource, TokenRange, TokenSource, prefetch
from shoal.errors import UsageError
from shoal.parallel.sequence.chunks import Documents
from shoal.parallel.sequence.context import SequenceContext

NO_TARGET = -100  # what losses ignore
_DOCUMENTS = -1  # the epoch of the documents' order


class PackedBatch(NamedTuple):
    """Samples of one micro-batch. ``documents`` are in host memory: attention waits for no device to know them."""

    tokens: Tensor  # [B, L], int64
    targets: Tensor  # [B, L], int64: the next token; -100 in padding and, if it is in ``tokens``, at a document's last
    positions: Tensor  # [B, L], int64, counted from 0 in each document
    documents: Documents  # padding is a document

    def shard(self, context: SequenceContext | None) -> PackedBatch:
        """This rank's positions, of a batch of whole rows; ``documents`` stay those of the rows.

        Ranks of ``cp`` get equal work within the documents. Attention must be given the result's ``documents``. That of
        a model of Transformers to its ``positions`` knows them without an exchange.
        """
        if context is None:
            return self
        documents = self.documents.balanced()
        tokens, targets, positions = (context.shard(tensor, documents=documents) for tensor in self[:3])
        return PackedBatch(tokens, targets, positions, documents)


class PackedSample(NamedTuple):
    """One row of a batch, before padding."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    lengths: list[int]  # of its documents


class StreamKey(NamedTuple):
    """A packed sample of a source."""

    source: int
    sample: int


class SamplePiece(NamedTuple):
    """Where tokens of a sample come from: ``start`` to ``stop`` of a document."""

    source: str
    document: int
    start: int
    stop: int
    file: str
    offset: int  # of the document, in the file's own unit


@dataclass(frozen=True)
class _PackedSource:
    source: TokenSource
    index: PackedIndex
    seed: int

    def sample_at(self, epoch: int, number: Indices, *, shuffle: bool) -> Indices:
        return shuffled(number, len(self.index), self.seed, epoch) if shuffle else number


class TokenStream(Dataset[Any]):
    """Samples of ``sequence_length`` tokens, without end. ``Loader`` and ``initialize(training_data=)`` take it.

    >>> from shoal.data.sources.source import InMemorySource
    >>> stream = TokenStream(InMemorySource([[1, 2, 3, 4], [5, 6, 7]]), 8, shuffle=False)
    >>> batch = stream.collate([stream[0]])
    >>> batch.tokens.tolist(), batch.targets.tolist()
    ([[1, 2, 3, 4, 5, 6, 7, 0]], [[2, 3, 4, -100, 6, 7, -100, -100]])
    >>> batch.documents.begins
    ((0, 4, 7, 8),)

    Args:
        packing: how documents make samples: ``concatenate``, ``greedy``, ``first_fit`` or ``none``.
        weights: of the sources, by samples; None: all sources end together.
        epochs: how often each source may be read before the stream's end, or one number for all; None: without limit.
        num_samples: of one pass; None: as many as weights and epochs allow.
        shuffle: documents before packing, and samples anew in each epoch.
        with_documents: batches are ``PackedBatch``. False: pairs of tokens and targets, for attention over the sample.
        padding: the token after the last document of a sample.

    Attributes: ``sequence_length``: tokens of a sample.

    Raises: UsageError: no source, a source without tokens, or a blend that cannot be met.
    """

    def __init__(
        self,
        sources: TokenSource | Sequence[TokenSource],
        sequence_length: int,
        *,
        packing: Packing = "concatenate",
        weights: Sequence[float] | None = None,
        epochs: Sequence[float | None] | float | None = 1,
        num_samples: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        with_documents: bool = True,
        padding: int = 0,
    ) -> None:
        each = list(sources) if isinstance(sources, Sequence) else [sources]
        if unknown := [type(source).__name__ for source in each if not hasattr(source, "lengths")]:
            raise UsageError(
                f"{', '.join(unknown)}: its tokens are not counted yet; packing needs the lengths of all documents.",
                where="TokenStream",
                do="tokenise ahead (`shoal data build` or open_source); or pass a data set that tokenises each sample"
                " when it is read to initialize(training_data=), and set data.num_workers.",
                code="data-lengths",
            )
        if empty := [source.name for source in each if not (source.lengths > 1).any()]:
            what = f"{', '.join(empty)}: no document of two tokens or more."
            raise UsageError(what, do="leave this source out.", code="data-empty")
        if not each or sequence_length < 2:
            raise UsageError(
                f"{len(each)} sources, samples of {sequence_length} tokens.",
                where="TokenStream",
                do="give at least one source, and samples of two tokens or more.",
                code="data-empty",
            )
        self.sequence_length, self._packing, self._seed, self._shuffle = sequence_length, packing, seed, shuffle
        self._with_documents, self._padding = with_documents, padding
        self._sources = [self._packed(source, seed + number * 2**32) for number, source in enumerate(each)]
        self._given = None if weights is None else [float(weight) for weight in weights]
        self._epochs = times = list(epochs) if isinstance(epochs, Sequence) else [epochs] * len(each)
        sizes = [len(packed.index) for packed in self._sources]
        self.blend = Blend([source.name for source in each], sizes, self._given, times, num_samples)

    def __len__(self) -> int:
        """Samples of one pass. The stream itself has no end: a second pass goes on with the next epochs."""
        return self.blend.num_samples

    @property
    def num_left_out(self) -> int:
        """Tokens that are targets of no sample: those of documents that ``packing="none"`` cuts."""
        return sum(packed.index.num_left_out for packed in self._sources)

    @property
    def tokenizer_folder(self) -> Path | None:
        """The files of the tokenizer that all sources were made by; None: it has no files, or there are several."""
        sources: list[Any] = [packed.source for packed in self._sources]
        is_one = len({getattr(source, "tokenizer_hash", "") for source in sources}) == 1
        path = getattr(sources[0], "tokenizer_path", "")
        return Path(path) if is_one and Path(path or "?").is_dir() else None

    def keys(self, positions: ArrayLike) -> list[StreamKey]:
        """The packed samples at these positions."""
        located = self.blend.locate(positions)
        sample = np.zeros_like(located.rank)
        for source, epoch in {*zip(located.source.tolist(), located.epoch.tolist(), strict=True)}:
            here = (located.source == source) & (located.epoch == epoch)
            sample[here] = self._sources[source].sample_at(epoch, located.rank[here], shuffle=self._shuffle)
        return [StreamKey(*row) for row in zip(located.source.tolist(), sample.tolist(), strict=True)]

    def work(self, keys: Sequence[StreamKey]) -> NDArray[np.float64]:
        """What samples differ in: the pairs of positions that attention computes."""
        work = np.zeros(len(keys))
        if self._with_documents:
            source, sample = np.array(keys, dtype=np.int64).reshape(-1, 2).T
            for number in np.unique(source).tolist():
                here = source == number
                work[here] = self._sources[number].index.pairs(sample[here])
        return work

    def __getitem__(self, key: StreamKey | int) -> PackedSample:
        """A sample by its key, or by its position."""
        source, sample = key if isinstance(key, tuple) else self.keys(key)[0]
        packed = self._sources[source]
        tokens, targets, lengths = [], [], []
        for document, start, stop in packed.index.pieces(sample):
            # The token after the piece is the target of its last one.
            piece = packed.source.tokens(document, start, stop + 1).astype(np.int64)
            following = np.full(stop - start, NO_TARGET, dtype=np.int64)
            following[: len(piece) - 1] = piece[1:]
            tokens.append(piece[: stop - start])
            targets.append(following)
            lengths.append(stop - start)
        return PackedSample(np.concatenate(tokens), np.concatenate(targets), lengths)

    def prefetch(self, keys: Sequence[StreamKey]) -> None:
        """Start to read what these samples need, of sources that can; does not wait."""
        for source, sample in keys:
            packed = self._sources[source]
            for document, start, stop in packed.index.pieces(sample):
                prefetch(packed.source, document, start, stop + 1)

    def collate(self, samples: Sequence[PackedSample]) -> PackedBatch | tuple[Tensor, Tensor]:
        """Samples as one batch."""
        shape = (len(samples), self.sequence_length)
        tokens, targets = (
            torch.full(shape, self._padding, dtype=torch.int64, device="cpu"),
            torch.full(shape, NO_TARGET, dtype=torch.int64, device="cpu"),
        )
        for row, sample in enumerate(samples):
            tokens[row, : len(sample.tokens)] = torch.from_numpy(sample.tokens)
            targets[row, : len(sample.targets)] = torch.from_numpy(sample.targets)
        return self._batch(tokens, targets, [sample.lengths for sample in samples])

    def form(self, keys: Sequence[StreamKey]) -> PackedBatch | tuple[Tensor, Tensor]:
        """The batch of these samples, without reading a source: tokens and targets are on the meta device."""
        tokens = torch.empty(len(keys), self.sequence_length, dtype=torch.int64, device="meta")
        pieces = [self._sources[source].index.pieces(sample) for source, sample in keys]
        lengths = [[stop - start for _, start, stop in row] for row in pieces]
        return self._batch(tokens, torch.empty_like(tokens), lengths)

    def _batch(
        self, tokens: Tensor, targets: Tensor, lengths: Sequence[list[int]]
    ) -> PackedBatch | tuple[Tensor, Tensor]:
        if not self._with_documents:
            return tokens, targets
        padded = [[*row, self.sequence_length - sum(row)] for row in lengths]
        positions = torch.stack([torch.cat([torch.arange(length, device="cpu") for length in row]) for row in padded])
        return PackedBatch(tokens, targets, positions, Documents.of_lengths(padded))

    def batch(self, positions: ArrayLike) -> PackedBatch | tuple[Tensor, Tensor]:
        """The samples at these positions."""
        return self.collate([self[key] for key in self.keys(positions)])

    def pieces(self, key: StreamKey) -> list[SamplePiece]:
        """Where the tokens of a sample are."""
        source = self._sources[key.source].source
        pieces = self._sources[key.source].index.pieces(key.sample)
        return [SamplePiece(source.name, *piece, *source.place(piece.document)) for piece in pieces]

    def source(self, key: StreamKey) -> str:
        return self._sources[key.source].source.name

    def place(self, key: StreamKey) -> str:
        """Where a sample is from, for messages."""
        pieces = (
            f"{piece.source}, tokens {piece.start} to {piece.stop} of document {piece.document}"
            f" ({piece.file}, at {piece.offset:,})"
            for piece in self.pieces(key)
        )
        return f"sample {key.sample}: {'; '.join(pieces)}"

    def state(self) -> dict[str, Any]:
        """What the samples depend on, in numbers and text."""
        return {
            "sequence_length": self.sequence_length,
            "packing": self._packing,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "sources": [[packed.source.name, packed.source.fingerprint] for packed in self._sources],
            "weights": self._given,
            "epochs": self._epochs,
            "with_documents": self._with_documents,
            "padding": self._padding,
            "changes": [[change.position, list(change.weights), list(change.taken)] for change in self.blend.changes],
        }

    def problems(self, saved: dict[str, Any]) -> list[str]:
        """Why samples would not be those of the run that saved this state."""
        mine = self.state()
        fixed = ["sequence_length", "packing", "seed", "shuffle", "with_documents", "padding"]
        if self._given is None:  # else its own weights mix from here on
            fixed += ["weights", "epochs"]
        problems = [
            f"its {key} was {saved[key]}, this run's is {mine[key]}"
            for key in fixed
            if key in saved and saved[key] != mine[key]
        ]
        theirs = saved.get("sources", [])
        if len(theirs) != len(self._sources):
            problems.append(f"it has {len(theirs)} data sources, this run has {len(self._sources)}")
        for number, (before, now) in enumerate(zip(theirs, mine["sources"], strict=False)):
            if before[1] != now[1]:
                name = f"{now[0]!r}" if before[0] == now[0] else f"{now[0]!r} (it was {before[0]!r})"
                problems.append(f"data source {number}, {name}, is not what it was")
        return problems

    def load(self, saved: dict[str, Any], position: int) -> None:
        """Mix as the run that saved this state; from ``position`` on by this run's weights, if they are others."""
        self.blend.changes = [WeightChange(at, tuple(now), tuple(taken)) for at, now, taken in saved["changes"]]
        if self._given is not None and saved["weights"] != self._given:
            self.blend.change(position, self._given)

    def _packed(self, source: TokenSource, seed: int) -> _PackedSource:
        number = np.arange(len(source))
        order = shuffled(number, len(source), seed, _DOCUMENTS) if self._shuffle else number
        index = pack(source.lengths, self.sequence_length, self._packing, order)
        return _PackedSource(source, index, seed)


def split(
    data: Tensor | Sequence[TokenSource],
    validation_fraction: float,
    sequence_length: int,
    *,
    seed: int = 0,
    weights: Sequence[float] | None = None,
    epochs: Sequence[float | None] | None = None,
    with_documents: bool = False,
) -> tuple[TokenStream, TokenStream]:
    """Training samples, and validation samples in order from each source's tail (at least one), all full.

    Batches are tokens and targets. The documents of a source are one run of tokens: each token's target is the next
    one, whichever document it is of. What is left at the end of each part is not used.
    ``with_documents``: batches are ``PackedBatch``, and no target is of another document than its token.
    A tail shares no sentence with what comes before it, which samples drawn at random would.

    Args:
        data: one run of tokens, [num_tokens], any integer dtype, not copied; or sources.
        weights: of the sources, in training and validation; None: by their lengths.
        epochs: how often training may read each source before the stream's end.

    Raises: UsageError: a source is too short for one sample of each.
    """
    sources = [InMemorySource([data.numpy()], "text")] if isinstance(data, Tensor) else data
    parts: tuple[list[TokenRange], list[TokenRange]] = ([], [])  # training and validation
    problems: list[str] = []
    for source in sources:
        num = int(source.lengths.sum())
        cut = num - max(sequence_length + 1, round(num * validation_fraction))
        if cut < sequence_length + 1:
            few = f"{num} tokens are too few for training and validation samples of {sequence_length}."
            problems.append(f"{source.name}: {few}")
            continue
        for part, start, stop in zip(parts, (0, cut), (cut, num), strict=True):
            after = 0 if with_documents else 1  # the last target, which a document's last token does not have
            full = (stop - start - after) // sequence_length * sequence_length + after
            part.append(TokenRange(source, start, start + full, joined=not with_documents))
    if problems:
        raise UsageError("\n    ".join(problems), do="give more text, or shorten the sequences.")
    options: dict[str, Any] = {"weights": weights, "seed": seed, "with_documents": with_documents}
    return (
        TokenStream(parts[0], sequence_length, epochs=epochs, **options),
        TokenStream(parts[1], sequence_length, epochs=None, shuffle=False, **options),
    )
