"""Text to token numbers and back: bytes, or a Hugging Face ``tokenizers`` JSON file."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from shoal.errors import UsageError


class Tokenizer(Protocol):
    """The methods of a tokenizer that the data uses."""

    vocab_size: int
    end_of_text: int | None  # the token between two documents; None where there is none

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Every UTF-8 byte is a token, 256 in all; the zero byte, which text does not contain, ends a document."""

    vocab_size = 256
    end_of_text: int | None = 0

    def encode(self, text: str) -> Sequence[int]:
        return text.encode("utf-8", errors="replace")

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer read from a ``tokenizer.json`` by the ``tokenizers`` library.

    Raises: UsageError: the library is not installed, or the file is not a tokenizer's.
    """

    # Names under which published tokenizers keep the token between documents.
    _ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")

    def __init__(self, path: str | Path) -> None:
        try:
            library = importlib.import_module("tokenizers")
        except ImportError as error:
            raise UsageError(
                f"reading {str(path)!r} needs the 'tokenizers' library, which is not installed.",
                do="pip install 'shoal[tokenizers]', or leave --tokenizer out to train on bytes.",
            ) from error
        if not Path(path).is_file():
            raise UsageError(f"no tokenizer file at {str(path)!r}.", do="name a tokenizer.json.")
        try:
            self._tokenizer: Any = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UsageError(f"{str(path)!r} is not a tokenizer file: {error}") from error
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        ends = (self._tokenizer.token_to_id(name) for name in self._ENDS)
        self.end_of_text: int | None = next((end for end in ends if end is not None), None)

    def encode(self, text: str) -> Sequence[int]:
        numbers: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return numbers

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens))
        return text


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """The tokenizer of that file, or bytes."""
    return ByteTokenizer() if path is None else FileTokenizer(path)


def tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> torch.Tensor:
    """All texts as one run of tokens, [num_tokens], each text followed by the end-of-text token where there is one.

    Returns: uint8, int32 or int64, the smallest that can represent the vocabulary.
    """
    dtype = np.uint8 if tokenizer.vocab_size <= 256 else np.int32 if tokenizer.vocab_size < 2**31 else np.int64
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype=dtype)
    parts: list[np.ndarray] = []
    for text in texts:
        numbers = tokenizer.encode(text)
        parts.append(np.frombuffer(numbers, np.uint8) if isinstance(numbers, bytes) else np.array(numbers, dtype))
        parts.append(end)
    return torch.from_numpy(np.concatenate(parts).astype(dtype, copy=False)) if parts else torch.empty(0)
