"""Reads a configuration from a dict, a file, a JSON text, base64, or the command line's arguments."""

from __future__ import annotations

import argparse
import base64
import binascii
import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.config.relaxed import Document, read
from shoal.errors import ConfigError
from shoal.text import did_you_mean


def open_source(source: object, args: object = None) -> tuple[Document, str]:
    """The text or dict of ``source``, and its name for errors.

    Args:
        source: a dict, a path, JSON text, urlsafe base64 of such text; None: ``args`` has it.
        args: an argparse namespace with ``deepspeed_config`` (or, as long ago, ``deepscale_config``).

    Raises: ConfigError: nothing to read, or it cannot be read.
    """
    if source is None:
        source = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
        if source is None:
            raise ConfigError(
                "no configuration was given.",
                do="pass a dict or a path as config=, or --deepspeed_config with shoal.add_config_arguments(parser).",
                code="config-missing",
            )
    if isinstance(source, Mapping):
        document, name = _plain(source), "the config dict"
    elif isinstance(source, os.PathLike):
        document, name = _from_file(Path(source)), str(source)
    elif isinstance(source, str):
        document, name = _from_text(source)
    else:
        raise ConfigError(
            f"a configuration is a dict, a path, JSON text or base64, not {type(source).__name__}.", code="config-type"
        )
    if not isinstance(document.value, dict):
        raise ConfigError(
            f"the configuration is {type(document.value).__name__}, not an object of keys.",
            where=name,
            do='write {"train_batch_size": ...}.',
            code="config-type",
        )
    return document, name


def _from_text(text: str) -> tuple[Document, str]:
    if text.lstrip("\ufeff \t\r\n").startswith(("{", "//", "#", "/*")):
        return read(text, "the JSON text"), "the JSON text"
    path = Path(text).expanduser()
    if _is_file(path):
        return _from_file(path), text
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        decoded = ""
    if decoded.lstrip("\ufeff \t\r\n").startswith("{"):
        return read(decoded, "the base64 text"), "the base64 text"
    near = did_you_mean(path.name, _config_files_near(path))
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    raise ConfigError(
        f"{shown!r} is neither a file, nor JSON, nor base64 of JSON{near or '.'}",
        where=f"looked from {Path.cwd()}",
        do="give the path of a JSON file.",
        code="config-missing",
    )


def _is_file(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or contains a null character
        return False


def _config_files_near(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in (".json", ".hjson"))
    except (OSError, ValueError):
        return []


def _from_file(path: Path) -> Document:
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = did_you_mean(path.name, _config_files_near(path))
        raise ConfigError(f"there is no file {str(path)!r}{near or '.'}", code="config-missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.", code="config-unreadable") from None
    return read(text, str(path), is_hjson=path.suffix == ".hjson")


def _plain(source: Mapping[Any, Any]) -> Document:
    """A copy, so that later changes of the caller's dict have no effect."""
    try:
        return Document(copy.deepcopy(dict(source)))
    except Exception:  # a value (a process group, an mpu) that cannot be copied is shared instead
        return Document(_shallow(source))


def _shallow(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _shallow(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shallow(inner) for inner in value]
    return value


HELP = "accepted for scripts written for DeepSpeed; has no effect"


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed``, ``--deepspeed_config`` and their oldest spellings to a parser.

    Returns: the same parser.
    """
    group = parser.add_argument_group("Shoal", "the configuration of the engine")
    group.add_argument("--deepspeed", default=False, action="store_true", help=HELP)
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the configuration, a JSON file")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser
