"""Data: text to tokens, tokens to samples, samples to batches. A resumed run neither repeats nor skips samples."""

from __future__ import annotations

from shoal.data.loading import Loader, RepeatingLoader, SamplePosition
from shoal.data.order import shuffled
from shoal.data.sources.opening import open_source, open_sources
from shoal.data.sources.source import InMemorySource, TokenSource
from shoal.data.sources.token_file import TokenFile, TokenFileWriter
from shoal.data.text import (
    PackedTokens,
    default_texts,
    read_texts,
    split,
    tokenize,
)
from shoal.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, TransformersTokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "FileTokenizer",
    "InMemorySource",
    "Loader",
    "PackedTokens",
    "RepeatingLoader",
    "SamplePosition",
    "TokenFile",
    "TokenFileWriter",
    "TokenSource",
    "Tokenizer",
    "TransformersTokenizer",
    "default_texts",
    "load_tokenizer",
    "open_source",
    "open_sources",
    "read_texts",
    "shuffled",
    "split",
    "tokenize",
]
