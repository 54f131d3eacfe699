"""Tokenizers: bytes, a ``tokenizers`` JSON file, or what Transformers reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import xxhash

from shoal.errors import UsageError
from shoal.optional import import_optional

_HUB = "hf:"  # before the name of a tokenizer on Hugging Face's hub


class Tokenizer(Protocol):
    """What the data needs of a tokenizer."""

    name: str
    vocab_size: int
    end_of_text: int | None  # the token between two documents; None where there is none

    @property
    def fingerprint(self) -> str:
        """A hash of what decides the tokens."""
        ...

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def save(self, folder: Path) -> None:
        """Write the files from which ``load_tokenizer(folder)`` makes this tokenizer."""
        ...


class ByteTokenizer:
    """Every UTF-8 byte is a token, 256 in all; the zero byte, which text does not contain, ends a document."""

    name = "bytes"
    vocab_size = 256
    end_of_text: int | None = 0
    fingerprint = "bytes"

    def encode(self, text: str) -> Sequence[int]:
        return text.encode("utf-8", errors="replace")

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Nothing: ``load_tokenizer("bytes")`` needs no file."""


class FileTokenizer:
    """A tokenizer read from a ``tokenizer.json`` by the ``tokenizers`` library.

    Raises: UsageError: the library is not installed, or the file is not a tokenizer's.
    """

    # Names under which published tokenizers keep the token between documents.
    _ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")

    def __init__(self, path: str | Path) -> None:
        otherwise = "leave --tokenizer out to train on bytes"
        library = import_optional("tokenizers", f"reading {str(path)!r}", "'shoal[tokenizers]'", otherwise)
        self._path = Path(path)
        if not self._path.is_file():
            raise UsageError(f"no tokenizer file at {str(path)!r}.", do="name a tokenizer.json.")
        try:
            self._tokenizer: Any = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UsageError(f"{str(path)!r} is not a tokenizer file: {error}") from error
        self.name = str(path)
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        ends = (self._tokenizer.token_to_id(name) for name in self._ENDS)
        self.end_of_text: int | None = next((end for end in ends if end is not None), None)

    @property
    def fingerprint(self) -> str:
        return xxhash.xxh64_hexdigest(self._path.read_bytes())

    def encode(self, text: str) -> Sequence[int]:
        numbers: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return numbers

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens))
        return text

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._path, folder / "tokenizer.json")


class TransformersTokenizer:
    """A tokenizer that Transformers' ``AutoTokenizer`` reads, from a folder or from the hub.

    Raises: UsageError: Transformers is not installed, or it finds no tokenizer.
    """

    def __init__(self, name: str | Path) -> None:
        user = f"reading the tokenizer {str(name)!r}"
        library = import_optional("transformers", user, "transformers", "name its tokenizer.json")
        try:
            self._tokenizer: Any = library.AutoTokenizer.from_pretrained(str(name))
        except (OSError, ValueError) as error:
            raise UsageError(f"Transformers finds no tokenizer at {str(name)!r}: {error}") from error
        self.name = str(name)
        self.vocab_size: int = len(self._tokenizer)  # with the tokens that were added
        self.end_of_text: int | None = self._tokenizer.eos_token_id

    @property
    def fingerprint(self) -> str:
        tokenizer = self._tokenizer
        state = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
        return xxhash.xxh64_hexdigest(f"{state} {tokenizer.eos_token_id} {tokenizer.chat_template}".encode())

    def encode(self, text: str) -> Sequence[int]:
        numbers: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return numbers

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens))
        return text

    def format_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """A conversation as text, by the tokenizer's chat template."""
        text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        return text

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(str(folder))


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """Bytes (None, or ``bytes``), a ``tokenizer.json`` or its folder, a folder of Transformers', or ``hf:NAME``."""
    if path is None or str(path) == ByteTokenizer.name:
        return ByteTokenizer()
    if str(path).startswith(_HUB):
        return TransformersTokenizer(str(path).removeprefix(_HUB))
    folder = Path(path)
    if (folder / "tokenizer_config.json").is_file():
        return TransformersTokenizer(folder)
    return FileTokenizer(folder / "tokenizer.json" if folder.is_dir() else folder)
