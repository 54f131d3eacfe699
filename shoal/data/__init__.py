"""Data: text to tokens, tokens to samples, samples to batches. A resumed run neither repeats nor skips samples."""

from __future__ import annotations

from shoal.data.blend import Blend
from shoal.data.loading import Loader, RepeatingLoader, ReplayedSample
from shoal.data.order import shuffled
from shoal.data.prefetch import ahead_on
from shoal.data.sources.opening import open_source, open_sources
from shoal.data.sources.source import InMemorySource, TokenSource
from shoal.data.sources.token_file import TokenFile, TokenFileWriter
from shoal.data.stream import PackedBatch, SamplePiece, TokenStream, split
from shoal.data.text import default_texts, read_texts, tokenize
from shoal.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, TransformersTokenizer, load_tokenizer

__all__ = [
    "Blend",
    "ByteTokenizer",
    "FileTokenizer",
    "InMemorySource",
    "Loader",
    "PackedBatch",
    "RepeatingLoader",
    "ReplayedSample",
    "SamplePiece",
    "TokenFile",
    "TokenFileWriter",
    "TokenSource",
    "TokenStream",
    "Tokenizer",
    "TransformersTokenizer",
    "ahead_on",
    "default_texts",
    "load_tokenizer",
    "open_source",
    "open_sources",
    "read_texts",
    "shuffled",
    "split",
    "tokenize",
]
