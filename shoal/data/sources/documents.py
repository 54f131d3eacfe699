"""Documents of text by the name of their source, one after the other.

    form of the name                       a document is                             library
    -------------------------------------  ----------------------------------------  -------------------
    *.jsonl, *.ndjson [.gz .bz2 .xz .zst]  the field of a line                       json, fsspec
    *.parquet                              the field of a row                        pyarrow
    *.tar [.gz .bz2 .xz]                   a .txt, or the field of a .json, inside   tarfile
    hf:NAME[:CONFIG][:SPLIT]               the field of a row                        datasets
    any other file, folder or pattern      a file of text

File names may have patterns (``part-*.jsonl``), ranges (``part-{000..127}.tar``) and fsspec's schemes (``s3://``); such
files are copied into a local cache. A field is text, or a conversation: a list of messages for a chat template.
"""

from __future__ import annotations

import glob
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from shoal.data.text import read_texts, text_files
from shoal.errors import ShoalError, UsageError
from shoal.optional import import_optional

Document = str | list[dict[str, Any]]
Form = Literal["jsonl", "parquet", "tar", "huggingface", "text"]

_HUGGING_FACE = "hf:"
_SUFFIXES: dict[str, Form] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".tar": "tar",
    ".tgz": "tar",
}
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_ROWS = 1024  # of a parquet file that are read together


def form_of(name: str) -> Form:
    """How a source is read, by its name."""
    if name.startswith(_HUGGING_FACE):
        return "huggingface"
    bare = name
    for suffix in _COMPRESSIONS:
        bare = bare.removesuffix(suffix)
    return _SUFFIXES.get(Path(bare).suffix, "text")


def read_files(name: str, *, field: str = "text", cache: str | Path) -> Iterator[tuple[Any, Iterator[Document]]]:
    """The documents of a source, in an order that does not change, by file; all texts, and all rows, are one.

    Args:
        field: of the lines and rows.
        cache: a folder for copies of remote files.

    Returns: of each file what changes when it does, as ``identity`` says, and its documents.

    Raises: UsageError: no such source; a missing library; a file, line or row that is damaged or has no such field, by
        its number.
    """
    form = form_of(name)
    if form == "text":
        yield identity(name), read_texts([name])
    elif form == "huggingface":
        rows = enumerate(_open_dataset(name))
        yield [*identity(name), field], (_field_of(row, field, f"row {number} of {name}") for number, row in rows)
    else:
        for file, stamp in zip(_files_of(name), identity(name), strict=True):
            yield [*stamp, field], _read_file(file, form, field, Path(cache))


def _read_file(file: str, form: Form, field: str, cache: Path) -> Iterator[Document]:
    with _naming(file):
        yield from _READERS[form](_local(file, cache), file, field)


def identity(name: str) -> list[Any]:
    """What changes when a source does: names, sizes and times of files; of files on a hub the commit or ETag."""
    form = form_of(name)
    if form == "huggingface":
        if (fingerprint := getattr(_open_dataset(name), "_fingerprint", None)) is not None:  # of one on disk
            return [name, str(fingerprint)]
        path, *rest = name.removeprefix(_HUGGING_FACE).split(":")
        datasets = import_optional("datasets", f"reading {name}", "'shoal[data]'")
        builder = datasets.load_dataset_builder(path, *rest[:-1])
        files = (builder.config.data_files or {}).values()
        return [name, builder.hash, *([*each, *map(list, each.origin_metadata)] for each in files)]
    if form == "text":
        return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in text_files(name)]
    import fsspec

    stamps = ("ETag", "mtime", "LastModified", "created")
    infos = [(file, fsspec.core.url_to_fs(file)[0].info(file)) for file in _files_of(name)]
    return [(file, info["size"], str(next((info[at] for at in stamps if at in info), ""))) for file, info in infos]


def _files_of(name: str) -> list[str]:
    """Raises: UsageError: there is none, or its file system is unknown."""
    import fsspec

    files: list[str] = []
    for part in _expanded(name):
        try:
            file_system, path = fsspec.core.url_to_fs(part)
            paths = (
                sorted(file_system.glob(path)) if glob.has_magic(part) else [path] if file_system.isfile(path) else []
            )
        except (ImportError, ValueError) as error:
            raise UsageError(f"{part} cannot be read: {error}", do="install the package that fsspec needs.") from error
        if not paths:
            raise UsageError(f"no file at {part!r}.", do="name a file, a pattern, or a range as {000..127}.")
        is_remote = "://" in part
        files += [file_system.unstrip_protocol(each) if is_remote else str(each) for each in paths]
    return files


def _expanded(name: str) -> list[str]:
    """A name for each number of its ranges: ``a{08..10}`` is a08, a09, a10."""
    match = _RANGE.search(name)
    if match is None:
        return [name]
    first, last = match.groups()
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [each for number in numbers for each in _expanded(name[: match.start()] + number + name[match.end() :])]


def _local(file: str, cache: Path) -> str:
    """The file itself, or its copy in the cache, which is made anew when the file has changed."""
    if "://" not in file:
        return file
    import fsspec

    options = {"cache_storage": str(cache / "files"), "check_files": True}
    return str(fsspec.open_local(f"filecache::{file}", filecache=options))


@contextmanager
def _naming(file: str) -> Iterator[None]:
    """Raises: UsageError: in place of what a format's library raises, with the file's name."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:  # each library has errors of its own
        raise UsageError(
            f"{file} cannot be read: {type(error).__name__}: {error}",
            do="it may be truncated or damaged: copy it again, or leave it out.",
        ) from error


def _field_of(record: Any, field: str, where: str) -> Document:
    """Raises: UsageError: the record has no text or conversation in the field."""
    value = record.get(field) if isinstance(record, dict) else None
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        return value
    fields = ", ".join(map(repr, record)) if isinstance(record, dict) else f"no fields: it is a {type(record).__name__}"
    raise UsageError(
        f"{where} has no text in the field {field!r}; it has {fields}.", do="name the field of the text (--field)."
    )


def _parsed(text: str | bytes, field: str, where: str) -> Document:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}.", do="correct it, or leave it out.") from error
    return _field_of(record, field, where)


def _read_lines(path: str, name: str, field: str) -> Iterator[Document]:
    import fsspec

    compression = next((codec for suffix, codec in _COMPRESSIONS.items() if name.endswith(suffix)), None)
    if compression is not None and compression not in fsspec.compression.compr:
        import_optional("zstandard", f"reading {name}", "'shoal[data]'")
    with fsspec.open(path, "rb", compression=compression) as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield _parsed(line, field, f"line {number} of {name}")


def _read_rows(path: str, name: str, field: str) -> Iterator[Document]:
    parquet = import_optional("pyarrow.parquet", f"reading {name}", "'shoal[data]'")
    with parquet.ParquetFile(path) as file:
        fields = file.schema_arrow.names
        number = 0
        for batch in file.iter_batches(_ROWS, columns=[field] if field in fields else fields):
            for row in batch.to_pylist():
                yield _field_of(row, field, f"row {number} of {name}")
                number += 1


def _read_members(path: str, name: str, field: str) -> Iterator[Document]:
    with tarfile.open(path) as archive:
        num_documents = 0
        for member in archive:
            extension = member.name.rpartition("/")[2].partition(".")[2]  # WebDataset's: after the first dot
            content = archive.extractfile(member) if extension in ("txt", "json") else None
            if content is None:
                continue
            num_documents += 1
            text = content.read().decode("utf-8", errors="replace")
            yield text if extension == "txt" else _parsed(text, field, f"{member.name} in {name}")
        if not num_documents:
            raise UsageError(f"{name} has no member that ends in .txt or .json.", do="name tar files with text.")


_READERS: dict[str, Callable[[str, str, str], Iterator[Document]]] = {
    "jsonl": _read_lines,
    "parquet": _read_rows,
    "tar": _read_members,
}


def _open_dataset(name: str) -> Any:
    """A dataset that was saved to disk; else a stream from files or from the hub."""
    datasets = import_optional("datasets", f"reading {name}", "'shoal[data]'")
    path, *rest = name.removeprefix(_HUGGING_FACE).split(":")
    *configs, split = rest or ["train"]
    with _naming(name):
        if (Path(path) / "dataset_dict.json").is_file():
            return datasets.load_from_disk(path)[split]
        if (Path(path) / "state.json").is_file():
            return datasets.load_from_disk(path)
        return datasets.load_dataset(path, *configs, split=split, streaming=True)
