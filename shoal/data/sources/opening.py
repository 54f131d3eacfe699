"""Sources by their names: files of tokens are opened, text is tokenised once into a local cache.

PATH                  a folder of shoal data build, an .idx or .bin file or their prefix, or a name of text
PATH@0.3              with a weight
BLEND.yaml, .json     a list of names, of {path, weight, epochs, field}, or a mapping of names to weights
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import xxhash
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.data.sources.build import build
from shoal.data.sources.documents import form_of, identity, read_files
from shoal.data.sources.indexed import data_of, index_of
from shoal.data.sources.token_file import TokenFile, TokenFileWriter, is_folder_of_tokens
from shoal.data.tokenizers import load_tokenizer
from shoal.errors import UsageError

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_BLENDS = (".yaml", ".yml", ".json")
_VERSION = 1  # of cached tokens


class SourceSpec(BaseModel):
    """A source's name, and its part in a blend."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    weight: _Positive | None = None
    epochs: _Positive | None = None  # how often it may be read
    field: str = "text"  # of lines and rows


def default_cache() -> Path:
    return Path.home() / ".cache" / "shoal"


def parse_sources(names: Sequence[str | Path]) -> list[SourceSpec]:
    """The sources that names and blend files give.

    Raises: UsageError: no source, a blend or a weight that cannot be read, weights for some sources only: all problems.
    """
    specs: list[SourceSpec] = []
    problems: list[str] = []
    for name in map(str, names):
        for entry in _entries(name, problems):
            try:
                specs.append(SourceSpec.model_validate(entry))
            except ValidationError as error:
                faults = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
                problems.append(f"{name}: {entry} is not a source: {'; '.join(faults)}.")
    unweighted = [spec.path for spec in specs if spec.weight is None]
    if unweighted and len(unweighted) < len(specs):
        problems.append(f"some sources have weights, but not {', '.join(unweighted)}.")
    if not specs and not problems:
        problems.append("no source is named.")
    _raise(problems, "write PATH, PATH@WEIGHT, or a YAML list of {path, weight, epochs, field}.")
    return specs


def open_source(
    spec: str | Path | SourceSpec,
    *,
    tokenizer: str | None = None,
    cache: str | Path | None = None,
    num_workers: int = 1,
    verify: bool = False,
) -> TokenFile:
    """Open one source; text is tokenised first, unless that has been done.

    Args:
        tokenizer: of text: what ``load_tokenizer`` reads; None: bytes.
        cache: folder for tokens of text and for copies of remote files; None: ``~/.cache/shoal``.
        num_workers: processes that tokenise.
        verify: read and verify all of a token file.

    Raises: UsageError: there is no such source, it is empty or damaged.
    """
    spec = spec if isinstance(spec, SourceSpec) else SourceSpec(path=str(spec))
    if is_tokens(spec.path):
        return TokenFile(spec.path, verify=verify)
    folder = default_cache() if cache is None else Path(cache)
    loaded = load_tokenizer(tokenizer)
    key = json.dumps([_VERSION, identity(spec.path), spec.field, loaded.fingerprint])
    path = folder / "tokens" / xxhash.xxh64_hexdigest(key.encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process tokenises, the others of this machine wait for it
        if not path.exists():
            with TokenFileWriter(path, tokenizer=loaded) as writer:
                files = read_files(spec.path, field=spec.field, cache=folder)
                build(files, tokenizer, writer, num_workers=num_workers)
    opened = TokenFile(path, verify=verify)
    opened.name = spec.path  # for messages: what the user has named
    return opened


def is_tokens(name: str) -> bool:
    """True if the name is of a file of tokens, whole or damaged; False: of text."""
    path = Path(name)
    is_prefix = index_of(path).is_file() or (data_of(path).is_file() and not path.exists())
    return is_prefix or path.suffix in (".idx", ".bin") or is_folder_of_tokens(path)


def is_plain_text(name: str) -> bool:
    """True if the name is of files that are text as a whole: no tokens, lines or rows, no blend, and no weight."""
    is_blend = name.endswith(_BLENDS) or "weight" in _entries(name, [])[0]
    return not is_blend and not is_tokens(name) and form_of(name) == "text"


def open_sources(
    names: Sequence[str | Path],
    *,
    vocab_size: int | None = None,
    max_length: int | None = None,
    min_tokens: int = 1,
    verify: bool = False,
    **options: Any,
) -> tuple[list[TokenFile], list[SourceSpec]]:
    """Open all sources and check them against the model.

    Args:
        vocab_size: of the model. Of Megatron's files the tokens are read and compared with ``verify`` only.
        max_length: of a document, where documents are not cut.
        min_tokens: of a source.
        options: of ``open_source``. Where a ``tokenizer`` is given, tokens made by another one are a problem.

    Returns: the sources, and their weights and epochs.

    Raises: UsageError: all problems of all sources.
    """
    specs = parse_sources(names)
    sources: list[TokenFile] = []
    problems: list[str] = []
    for spec in specs:
        try:
            source = open_source(spec, verify=verify, **options)
            sources.append(source)
            largest = source.largest_token if verify or source.header is not None else -1
            problems += _misfits(source, vocab_size, max_length, min_tokens, options.get("tokenizer"), largest)
        except UsageError as error:
            problems.append(f"{spec.path}: {error.what}" + (f" ({error.do})" if error.do else ""))
    _raise(problems, "correct or leave out these sources.")
    return sources, specs


def _misfits(
    source: TokenFile,
    vocab_size: int | None,
    max_length: int | None,
    min_tokens: int,
    tokenizer: str | None,
    largest: int,
) -> list[str]:
    """What a model with these limits cannot read of a source."""
    problems = []
    if vocab_size is not None and largest >= vocab_size:
        problems.append(f"{source.name} has the token {largest}; the model's are 0 to {vocab_size - 1}.")
    if tokenizer is not None and source.tokenizer_hash not in ("", load_tokenizer(tokenizer).fingerprint):
        problems.append(f"{source.name} was made by the tokenizer {source.tokenizer_path}, not by {tokenizer}.")
    if (num_tokens := int(source.lengths.sum())) < min_tokens:
        problems.append(f"{source.name} has {num_tokens:,} tokens; at least {min_tokens:,} are needed.")
    longest = int(source.lengths.argmax())
    if max_length is not None and source.lengths[longest] > max_length:
        problems.append(
            f"{source.name} has {(source.lengths > max_length).sum():,} documents of more than {max_length:,} tokens;"
            f" document {longest} has {source.lengths[longest]:,}."
        )
    return problems


def _entries(name: str, problems: list[str]) -> list[Any]:
    """Of a blend file what it lists, of any other name itself and its weight."""
    if not name.endswith(_BLENDS):
        path, separator, weight = name.rpartition("@")
        if not separator or "/" in weight or Path(name).exists():
            return [{"path": name}]
        return [{"path": path, "weight": weight}]
    try:
        content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"{name} cannot be read: {error}")
        return []
    if isinstance(content, dict):
        return [{"path": path, "weight": weight} for path, weight in content.items()]
    if not isinstance(content, list) or not content:
        problems.append(f"{name} has no list of sources.")
        return []
    return [part for entry in content for part in (_entries(entry, problems) if isinstance(entry, str) else [entry])]


def _raise(problems: list[str], do: str) -> None:
    if problems:
        raise UsageError("\n    ".join(problems), where="data sources", do=do)
