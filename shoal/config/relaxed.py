"""Reads JSON as people write it: comments, trailing or missing commas, single quotes, bare names of keys.

The standard library's reader is stricter and does not say where a key is; here every key keeps its line, so that an
error can name it, and a key given twice is an error that names both places.

    >>> read("{stage: 3, // ZeRO\\n 'bucket': 2e8,}").value
    {'stage': 3, 'bucket': 200000000.0}

Text without quotes is read where it is the last on its line, as in Hjson. Hjson, in files of that suffix, is wider
still: text without quotes ends with its line whatever it holds, and the outermost braces may be missing.

    >>> read("type: AdamW\\nsteps: 3", is_hjson=True).value
    {'type': 'AdamW', 'steps': 3}
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import ConfigError

Path = tuple[str | int, ...]

SPACE = re.compile(r"(?:\s+|//[^\n]*|\#[^\n]*|/\*.*?\*/)*", re.DOTALL)
TEXT = re.compile(r"""'''(.*?)'''|"((?:[^"\\\n]|\\.)*)"|'((?:[^'\\\n]|\\.)*)'""", re.DOTALL)
LINE = re.compile(r"[^\s,:{}\[\]][^\n]*")
BARE = re.compile(r"[^\s\"',:{}\[\]#][^\"',{}\[\]\n#]*(?=\n)")  # text without quotes, alone until its line ends
WORD = re.compile(r"[^\s\"',:{}\[\]]+")
NUMBER = re.compile(r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|Infinity|NaN)")
WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
MAX_DEPTH = 100
HJSON_ENDS = re.compile(r"[ \t]*(?:[,}\]\n\r#]|//|/\*|$)")  # what may follow a number or a word that is not text


@dataclass
class Document:
    """The value of a text, and the line (from 1) of each key."""

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)


def read(text: str, name: str = "the configuration", *, is_hjson: bool = False) -> Document:
    """Read a text.

    Raises: ConfigError: it is not JSON, even in this wider sense, or it has a key twice.
    """
    reader = _JsonReader(text.removeprefix("\ufeff"), name, is_hjson=is_hjson)
    reader.skip()
    if reader.at >= len(reader.text):
        raise reader.error("the text is empty", "write at least {}.")
    has_braces = not is_hjson or reader.text.startswith(("{", "["), reader.at)
    value = reader.value(()) if has_braces else dict(reader.items((), ""))
    reader.skip()
    if reader.at < len(reader.text):
        raise reader.error(f"{reader.here()} after the end of the value", "leave one JSON value in the file.")
    if reader.twice:
        raise ConfigError(
            f"{'; '.join(reader.twice)}.", where=name, do="keep one of them.", code="config-duplicate-key"
        )
    return Document(value, reader.lines)


class _JsonReader:
    def __init__(self, text: str, name: str, *, is_hjson: bool) -> None:
        self.text = text
        self.is_hjson = is_hjson
        self.name = name
        self.at = 0
        self.lines: dict[Path, int] = {}
        self.twice: list[str] = []

    def skip(self) -> bool:
        """Skip space and comments. Returns: True if a line ended in them."""
        match = self.match(SPACE)
        return match is not None and "\n" in match.group()

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Skip what matches here."""
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match

    def takes(self, char: str) -> bool:
        """Skip a character, if it is here."""
        is_here = self.text.startswith(char, self.at)
        self.at += is_here
        return is_here

    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def here(self) -> str:
        rest = self.text[self.at : self.at + 20].split("\n")[0]
        return repr(rest) if rest else "the end of the text" if self.at >= len(self.text) else "the end of the line"

    def error(self, what: str, do: str = "") -> ConfigError:
        column = self.at - self.text.rfind("\n", 0, self.at)
        where = f"{self.name}, line {self.line()}, column {column}"
        return ConfigError(f"not JSON: {what}.", where=where, do=do, code="config-syntax")

    def value(self, path: Path) -> Any:
        if len(path) > MAX_DEPTH:
            raise self.error(f"objects nested more than {MAX_DEPTH} deep")
        if self.takes("{"):
            return dict(self.items(path, "}"))
        if self.takes("["):
            return [item for _, item in self.items(path, "]")]
        if self.text.startswith(("'", '"'), self.at):
            return self.string()
        start = self.at
        match = self.match(WORD)
        word = match.group() if match else ""
        is_literal = word in WORDS or NUMBER.fullmatch(word)
        if self.is_hjson and word and not (is_literal and HJSON_ENDS.match(self.text, self.at)):
            self.at = start
            line = self.match(LINE)
            assert line is not None
            return line.group().rstrip()
        if NUMBER.fullmatch(word):
            return int(word) if word.lstrip("+-").isdecimal() else float(word.replace("Infinity", "inf"))
        if word in WORDS:
            return WORDS[word]
        self.at = start
        bare = self.match(BARE) if path and word not in PYTHON_WORDS else None
        if bare is not None:
            return bare.group().rstrip()
        if word in PYTHON_WORDS:
            right = PYTHON_WORDS[word]
            raise self.error(f"{word} is Python, JSON says {right}", f"write {right}.")
        do = "put text in double quotes." if word else ""
        raise self.error(f"expected a value, found {repr(word) if word else self.here()}", do)

    def items(self, path: Path, end: str) -> list[tuple[str | int, Any]]:
        """The items up to a closing bracket; a comma between two may be missing at the end of a line."""
        pairs: list[tuple[str | int, Any]] = []
        is_separated = True
        while True:
            is_separated = self.skip() or is_separated
            if self.takes(end) if end else self.at >= len(self.text):
                return pairs
            if not is_separated:
                raise self.error(f"expected a comma or '{end}', found {self.here()}")
            name = len(pairs) if end == "]" else self.key(path, {name for name, _ in pairs})
            pairs.append((name, self.value((*path, name))))
            is_separated = self.skip()
            is_separated = self.takes(",") or is_separated

    def key(self, path: Path, names: set[str | int]) -> str:
        """Read a key and its colon. ``names``: of the keys before it in its object."""
        line = self.line()
        if self.text.startswith(("'", '"'), self.at):
            name = self.string()
        elif match := self.match(WORD):
            name = match.group()
        else:
            raise self.error(f"expected a key, found {self.here()}")
        self.skip()
        if not self.takes(":"):
            raise self.error(f"expected ':' after the key {name!r}, found {self.here()}")
        self.skip()
        inner = (*path, name)
        if name in names:
            dotted = ".".join(map(str, inner))
            self.twice.append(f"the key {dotted!r} is on line {self.lines[inner]} and again on line {line}")
        self.lines[inner] = line
        return name

    def string(self) -> str:
        start = self.at
        match = self.match(TEXT)
        if match is None:
            raise self.error("a string without its closing quote", "close it on the same line.")
        verbatim, double, single = match.groups()
        if verbatim is not None:
            return str(verbatim)
        if single is not None:
            double = re.sub(r'\\\'|"', lambda quote: "'" if quote.group() == r"\'" else r"\"", single)
        try:
            return str(json.loads(f'"{double}"', strict=False))
        except ValueError:
            self.at = start
            raise self.error(f"a string with an escape that JSON does not have: {match.group()[:40]}") from None
