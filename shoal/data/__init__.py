"""Data: text into tokens, tokens into samples, samples into batches that a resumed run neither repeats nor skips."""

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
