"""A hook of MkDocs: pages and files outside of docs/ that pages link to are part of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"benchmarks/README.md": "benchmarks.md", "CHANGELOG.md": "changes.md"}
EXAMPLES = {f"examples/{path.name}": f"examples/{path.name}" for path in (ROOT / "examples").glob("*.*")}
PLACES = {**PAGES, **EXAMPLES}
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add them."""
    for source, place in PLACES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to them, and of them, lead to their places in the site."""
    place = page.file.src_uri
    source = next((name for name, own in PAGES.items() if own == place), f"docs/{place}")

    def fit(match: re.Match[str]) -> str:
        begin, target, anchor, end = match.groups()
        if ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path not in PLACES and not path.startswith("docs/"):
            return match[0]
        goal = PLACES.get(path) or path.removeprefix("docs/")
        return f"{begin}{posixpath.relpath(goal, posixpath.dirname(place) or '.')}{anchor or ''}{end}"

    return LINK.sub(fit, markdown)
