"""Data: text to tokens, tokens to samples, samples to batches. A resumed run neither repeats nor skips samples."""

from __future__ import annotations

from shoal.data.loading import Loader, RepeatingLoader, SamplePosition
from shoal.data.packed import PackedTokens, split
from shoal.data.text import default_texts, read_texts
from shoal.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer, tokenize

__all__ = [
    "ByteTokenizer",
    "FileTokenizer",
    "Loader",
    "PackedTokens",
    "RepeatingLoader",
    "SamplePosition",
    "Tokenizer",
    "default_texts",
    "load_tokenizer",
    "read_texts",
    "split",
    "tokenize",
]
