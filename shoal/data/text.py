"""Text to samples: files of text, tokens, and samples of one length.

tokens   a b c d e f g h i        sequence_length 4
sample 0 a b c d -> b c d e
sample 1 e f g h -> f g h i
"""

from __future__ import annotations

import ast
import glob
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from shoal.data.tokenizers import Tokenizer
from shoal.errors import UsageError

# What a folder is searched for. A file that is named itself is read whatever it is called.
_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".pyi", ".tex", ".html", ".c", ".h", ".cpp", ".rs", ".go", ".js"})
_HIDDEN_PREFIX = "."


def read_texts(sources: Sequence[str | Path]) -> Iterator[str]:
    """The text of every file that the sources name, each once, in sorted order within a source.

    Args:
        sources: paths of files (read as UTF-8, undecodable bytes replaced), folders (searched for text files) or
            patterns (``notes/**/*.md``).

    Raises: UsageError: a source that names no text file, or a file that is empty of text altogether.
    """
    seen: set[Path] = set()
    for source in sources:
        files = text_files(source)
        if not files:
            why = "the folder has none" if Path(source).exists() else "there is no such path"
            raise UsageError(
                f"no text file at {str(source)!r}: {why}.",
                do=f"name a file, a folder with files that end in {', '.join(sorted(_SUFFIXES))}, or a pattern.",
            )
        for file in files:
            if file not in seen:
                seen.add(file)
                yield file.read_text(encoding="utf-8", errors="replace")


def default_texts() -> Iterator[str]:
    """The Python language reference's topics and the standard library's docstrings: about 1.3 MB of English."""
    # Imported as data: it is a dictionary of the language reference's chapters that `help()` reads.
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        docstrings = _docstrings_of(file)
        if docstrings:
            yield "\n\n".join(docstrings) + "\n"


def text_files(source: str | Path) -> list[Path]:
    """The files that a source of ``read_texts`` names, sorted; empty if there are none."""
    path = Path(source)
    if path.is_file():
        return [path.resolve()]
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
        visible = (file for file in files if not _is_hidden(file.relative_to(path)))
        return sorted(file.resolve() for file in visible)
    return sorted(Path(name).resolve() for name in glob.glob(str(source), recursive=True) if Path(name).is_file())


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(_HIDDEN_PREFIX) for part in relative.parts)


def _docstrings_of(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(tree) if isinstance(node, documented))
    return [text for text in map(ast.get_docstring, nodes) if text]


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
    if not parts:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    return torch.from_numpy(np.concatenate(parts).astype(dtype, copy=False))
