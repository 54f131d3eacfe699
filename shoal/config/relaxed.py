"""Reads JSON as people write it: comments, trailing or missing commas, single quotes, bare names of keys.

The standard library's reader is stricter and forgets where a key stood; here every key keeps its line, so that an
error can name it, and a key given twice is an error that names both places.

    >>> read("{stage: 3, // ZeRO\\n 'bucket': 2e8,}").value
    {'stage': 3, 'bucket': 200000000.0}
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import ConfigError

Path = tuple[str | int, ...]

SPACE = re.compile(r"(?:\s+|//[^\n]*|\#[^\n]*|/\*.*?\*/)+", re.DOTALL)
NUMBER = re.compile(r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|Infinity|NaN)")
WORD = re.compile(r"[^\s\"',:{}\[\]]+")
DOUBLE = re.compile(r'"(?:[^"\\\n]|\\.)*"')
SINGLE = re.compile(r"'(?:[^'\\\n]|\\.)*'")
TRIPLE = re.compile(r"'''(.*?)'''", re.DOTALL)
WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
MAX_DEPTH = 100


@dataclass
class Document:
    """What a text says, and the line (from 1) on which each key stands."""

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)


def read(text: str, name: str = "the configuration") -> Document:
    """Read a text.

    Raises: ConfigError: it is not JSON, even in this wider sense, or a key stands in it twice.
    """
    reader = _Reader(text.removeprefix("\ufeff"), name)
    reader.skip()
    if reader.at >= len(reader.text):
        raise reader.error("the text is empty", "write at least {}.")
    value = reader.value((), 0)
    reader.skip()
    if reader.at < len(reader.text):
        raise reader.error(f"{reader.here()} after the end of the value", "leave one JSON value in the file.")
    if reader.twice:
        raise ConfigError(
            "; ".join(
                f"the key {'.'.join(map(str, path))!r} stands on line {first} and again on line {second}"
                for path, first, second in reader.twice
            )
            + ".",
            where=name,
            do="keep one of them.",
            code="config-duplicate-key",
        )
    return Document(value, reader.lines)


class _Reader:
    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.at = 0
        self.lines: dict[Path, int] = {}
        self.twice: list[tuple[Path, int, int]] = []

    def skip(self) -> bool:
        """Go past space and comments; say whether a line ended in them."""
        match = SPACE.match(self.text, self.at)
        if match is None:
            return False
        self.at = match.end()
        return "\n" in match.group()

    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def here(self) -> str:
        rest = self.text[self.at : self.at + 20].split("\n")[0]
        return repr(rest) if rest else "the end of the text" if self.at >= len(self.text) else "the end of the line"

    def error(self, what: str, do: str = "") -> ConfigError:
        column = self.at - (self.text.rfind("\n", 0, self.at) + 1) + 1
        return ConfigError(
            f"not JSON: {what}.", where=f"{self.name}, line {self.line()}, column {column}", do=do, code="config-syntax"
        )

    def value(self, path: Path, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.error(f"objects nested more than {MAX_DEPTH} deep")
        char = self.text[self.at : self.at + 1]
        if char == "{":
            return self.object(path, depth)
        if char == "[":
            return self.list(path, depth)
        if char in ("'", '"'):
            return self.string()
        number = NUMBER.match(self.text, self.at)
        word = WORD.match(self.text, self.at)
        if number is not None and word is not None and number.end() == word.end():
            self.at = number.end()
            return _number(number.group())
        if word is None:
            raise self.error(f"expected a value, found {self.here()}")
        if word.group() in WORDS:
            self.at = word.end()
            return WORDS[word.group()]
        if word.group() in PYTHON_WORDS:
            right = PYTHON_WORDS[word.group()]
            raise self.error(f"{word.group()} is Python, JSON says {right}", f"write {right}.")
        raise self.error(f"expected a value, found {word.group()!r}", "put text in double quotes.")

    def object(self, path: Path, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.at += 1
        is_separated = True
        while True:
            is_separated = self.skip() or is_separated
            if self.text[self.at : self.at + 1] == "}":
                self.at += 1
                return found
            if not is_separated:
                raise self.error(f"expected a comma or '}}', found {self.here()}")
            line = self.line()
            name = self.name_of_key()
            inner = (*path, name)
            if name in found:
                self.twice.append((inner, self.lines[inner], line))
            self.skip()
            if self.text[self.at : self.at + 1] != ":":
                raise self.error(f"expected ':' after the key {name!r}, found {self.here()}")
            self.at += 1
            self.skip()
            self.lines[inner] = line
            found[name] = self.value(inner, depth + 1)
            is_separated = self.comma()

    def list(self, path: Path, depth: int) -> list[Any]:
        found: list[Any] = []
        self.at += 1
        is_separated = True
        while True:
            is_separated = self.skip() or is_separated
            if self.text[self.at : self.at + 1] == "]":
                self.at += 1
                return found
            if not is_separated:
                raise self.error(f"expected a comma or ']', found {self.here()}")
            found.append(self.value((*path, len(found)), depth + 1))
            is_separated = self.comma()

    def comma(self) -> bool:
        """Go past a comma; say whether there was one, or the end of a line in its place."""
        has_ended = self.skip()
        if self.text[self.at : self.at + 1] == ",":
            self.at += 1
            return True
        return has_ended

    def name_of_key(self) -> str:
        if self.text[self.at : self.at + 1] in ("'", '"'):
            return self.string()
        word = WORD.match(self.text, self.at)
        if word is None:
            raise self.error(f"expected a key, found {self.here()}")
        self.at = word.end()
        return word.group()

    def string(self) -> str:
        triple = TRIPLE.match(self.text, self.at)
        if triple is not None:
            self.at = triple.end()
            return triple.group(1)
        match = (DOUBLE if self.text[self.at] == '"' else SINGLE).match(self.text, self.at)
        if match is None:
            raise self.error("a text without its closing quote", "close it on the same line.")
        inner = match.group()[1:-1]
        if self.text[self.at] == "'":
            inner = re.sub(r'\\\'|"', lambda found: "'" if found.group() == r"\'" else r"\"", inner)
        try:
            text = json.loads(f'"{inner}"', strict=False)
        except ValueError:
            raise self.error(f"a text with an escape that JSON does not have: {match.group()[:40]}") from None
        self.at = match.end()
        return str(text)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text.replace("Infinity", "inf"))
