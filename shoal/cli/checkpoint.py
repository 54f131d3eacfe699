"""``shoal checkpoint``: lists, verifies and removes the checkpoints of a folder."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.usage import UsageCommand, checkpoints_of

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from shoal.checkpoint.storage import Storage

app = typer.Typer(
    name="checkpoint",
    help="List, verify and prune checkpoints.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_FOLDER = typer.Argument(
    help="Folder with checkpoints, or of a run of `shoal train`, or an fsspec URL.", callback=checkpoints_of
)


def _none_in(storage: Storage) -> typer.Exit:
    """Print that there is none of Shoal's."""
    from shoal.checkpoint import directory

    theirs = directory.foreign_tag(storage)
    other = ""
    if theirs is not None:
        name, saved_as = theirs
        other = f": {name} there was saved by {saved_as.program}, and `shoal convert` verifies and reads it"
    print(f"no checkpoints in {storage.url}{other}", file=sys.stderr)
    return typer.Exit(1)


@app.command("list", cls=UsageCommand)
def list_checkpoints(folder: Annotated[str, _FOLDER]) -> None:
    """Show the checkpoints of a folder, the newest first.

    Reads manifests and the sizes of files, not the tensors: `shoal checkpoint verify` reads every byte.
    """
    from shoal.checkpoint import directory
    from shoal.checkpoint.storage import open_storage
    from shoal.text import format_bytes, table

    storage = open_storage(folder)
    checkpoints = directory.list_checkpoints(storage)
    if not checkpoints:
        raise _none_in(storage)
    hinted = directory.read_latest(storage)
    rows = []
    for entry in checkpoints:
        if entry.manifest is None:
            rows.append([entry.folder, "", "", "", "", f"damaged: {entry.problem.what if entry.problem else ''}"])
            continue
        manifest = entry.manifest
        marks = [name for name, is_so in (("latest", entry.folder == hinted),) if is_so]
        marks += [] if manifest.is_for_resuming else ["by tag only"]
        rows.append(
            [
                entry.folder,
                str(manifest.step),
                manifest.created[:19].replace("T", " "),
                str(manifest.world.get("size", "")),
                format_bytes(manifest.nbytes),
                ", ".join(marks),
            ]
        )
    print(table(rows, ["checkpoint", "step", "saved (UTC)", "ranks", "size", ""]))
    print(f"Sizes were checked, not every byte: shoal checkpoint verify {folder}", file=sys.stderr)


@app.command("verify", cls=UsageCommand)
def verify_checkpoints(
    folder: Annotated[str, _FOLDER],
    tag: Annotated[str | None, typer.Option(help="Verify this checkpoint only; default: all.")] = None,
) -> None:
    """Read every byte and compare the checksums. Exits with 1 if anything is damaged."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from shoal.checkpoint import directory
    from shoal.checkpoint.storage import open_storage

    storage = open_storage(folder)
    folders = (
        [directory.find_tag(storage, tag)] if tag else [entry.folder for entry in directory.list_checkpoints(storage)]
    )
    if not folders and storage.exists("manifest.json"):
        folders = [""]  # the folder is a checkpoint itself
    if not folders:
        raise _none_in(storage)
    num_damaged, console = 0, Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    for name in folders:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            label = name or Path(storage.url).name
            total = sum(storage.size(f"{name}/{file}".lstrip("/")) for file in storage.names(name))
            task = progress.add_task(label, total=total)
            problems = directory.verify(storage, name, partial(_advance, progress, task))
        if problems:
            num_damaged += 1
            print(f"{label}: DAMAGED")
            for problem in problems:
                print(f"  {problem}".replace("\n", "\n  "))
        else:
            print(f"{label}: intact")
    if num_damaged:
        raise typer.Exit(1)


def _advance(progress: Progress, task: TaskID, _: str, nbytes: int) -> None:
    progress.advance(task, nbytes)


@app.command("prune", cls=UsageCommand)
def prune(
    folder: Annotated[str, _FOLDER],
    keep: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")],
    keep_every: Annotated[int, typer.Option(min=0, help="Also keep checkpoints whose step is a multiple of this.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
) -> None:
    """Remove old checkpoints. Those to keep are verified first; a damaged one does not count."""
    from shoal.checkpoint import directory
    from shoal.checkpoint.commit import Retention, discard, prunable
    from shoal.checkpoint.lock import FolderLock
    from shoal.checkpoint.storage import LocalStorage, open_storage

    storage = open_storage(folder)
    with FolderLock(storage.root) if isinstance(storage, LocalStorage) else nullcontext():
        whole: list[directory.FoundCheckpoint] = []
        for entry in directory.list_checkpoints(storage):
            num_whole = len([w for w in whole if w.manifest is not None and w.manifest.is_for_resuming])
            if entry.manifest is None:
                print(f"{entry.folder}: damaged, kept")
                continue
            if num_whole < keep and directory.verify(storage, entry.folder):
                print(f"{entry.folder}: damaged, does not count, kept")
                continue
            whole.append(entry)
        for entry in prunable(whole, Retention(keep, keep_every)):
            print(f"{entry.folder}: {'would be removed' if dry_run else 'removed'}")
            if not dry_run:
                discard(storage, entry.folder)
