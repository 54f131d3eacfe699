"""Data: text to tokens, tokens to samples, samples to batches. A resumed run neither repeats nor skips samples."""

from __future__ import annotations

from shoal.data.loading import Loader, RepeatingLoader, SamplePosition
from shoal.data.order import shuffled
from shoal.data.sources.source import InMemorySource, TokenSource
from shoal.data.text import (
    ByteTokenizer,
    FileTokenizer,
    PackedTokens,
    Tokenizer,
    default_texts,
    load_tokenizer,
    read_texts,
    split,
    tokenize,
)

__all__ = [
    "ByteTokenizer",
    "FileTokenizer",
    "InMemorySource",
    "Loader",
    "PackedTokens",
    "RepeatingLoader",
    "SamplePosition",
    "TokenSource",
    "Tokenizer",
    "default_texts",
    "load_tokenizer",
    "read_texts",
    "shuffled",
    "split",
    "tokenize",
]
