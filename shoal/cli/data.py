"""``shoal data``: builds, shows and checks files of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.usage import UsageCommand

app = typer.Typer(
    name="data",
    help="Build, show and check files of tokens.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("build", cls=UsageCommand)
def build(
    sources: Annotated[
        list[str],
        typer.Argument(help="Text (.jsonl, .parquet, .tar, hf:NAME[:SPLIT], files, folders), or files of tokens."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make. Megatron reads its file `tokens`.")],
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A tokenizer.json, a folder, or hf:NAME.", show_default="bytes")
    ] = None,
    field: Annotated[str, typer.Option("--field", help="Field of lines and rows with text or messages.")] = "text",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes that tokenise.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --out names.")] = False,
) -> None:
    """Tokenise text, or convert and join files of tokens.

    The result does not depend on the number of workers, and is there whole or not at all. A build that was stopped goes
    on where it was, when the same command is given again.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from shoal.data.sources import build as building
    from shoal.data.sources.documents import read_files
    from shoal.data.sources.opening import default_cache, is_tokens
    from shoal.data.sources.token_file import TokenFile, TokenFileWriter
    from shoal.data.tokenizers import load_tokenizer
    from shoal.errors import UsageError
    from shoal.text import format_count

    files = [TokenFile(name) for name in sources if is_tokens(name)]
    if files and len(files) < len(sources):
        names = ", ".join(name for name in sources if not is_tokens(name))
        raise UsageError(f"{names}: text, while other sources are tokens.", do="build the text first.")
    if files and tokenizer is None:  # they keep theirs, where all have the same
        is_one = len({file.tokenizer_hash for file in files}) == 1 and files[0].tokenizer_path
        loaded = load_tokenizer(files[0].tokenizer_path) if is_one else None
    else:
        loaded = load_tokenizer(tokenizer)
    vocab_size = loaded.vocab_size if loaded else max(file.largest_token for file in files) + 1
    writer = TokenFileWriter(out, tokenizer=loaded, vocab_size=vocab_size, overwrite=overwrite)
    console = Console(stderr=True)
    columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress, writer:
        task = progress.add_task("reading", total=sum(map(len, files)) or None)  # of text it is not known

        def show() -> None:
            counts = f"{writer.num_documents:,} documents, {format_count(writer.num_tokens)} tokens"
            progress.update(task, description=counts, completed=writer.num_documents)

        for file in files:
            building.copy(file, writer, on_batch=show)
        if not files:
            options: dict[str, Any] = {"field": field, "cache": default_cache()}
            texts = (each for name in sources for each in read_files(name, **options))
            num_kept = building.build(texts, tokenizer, writer, num_workers=workers, on_batch=show)
            if num_kept:
                console.print(f"{num_kept:,} documents are those of a build that was stopped.")
    print(f"{out}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens")


@app.command("show", cls=UsageCommand)
def show(
    path: Annotated[
        str, typer.Argument(help="Folder of `shoal data build`, or the prefix of an .idx and a .bin file.")
    ],
    document: Annotated[int | None, typer.Option("--document", min=0, help="Print this document.")] = None,
) -> None:
    """Show what a file of tokens holds, or one of its documents."""
    from shoal.data.sources.token_file import TokenFile
    from shoal.data.tokenizers import load_tokenizer
    from shoal.errors import UsageError

    file = TokenFile(path)
    if document is None:
        lengths = sorted(file.lengths.tolist())
        median = lengths[len(file) // 2]
        print(f"documents    {len(file):,}, of {lengths[0]:,} to {lengths[-1]:,} tokens, median {median:,}")
        print(f"tokens       {sum(lengths):,}, {file.tokens(0).dtype}")
        if file.header is not None:
            print(f"vocabulary   {file.header.vocab_size:,}, largest token {file.largest_token:,}")
            print(f"tokenizer    {file.header.tokenizer or 'unknown'} {file.tokenizer_hash}")
        print(f"fingerprint  {file.fingerprint}")
        return
    if document >= len(file):
        raise UsageError(f"{path} has {len(file):,} documents, 0 to {len(file) - 1}.", do="choose one of them.")
    tokens = file.tokens(document).tolist()
    print("{}, byte {}".format(*file.place(document)))
    print(load_tokenizer(file.tokenizer_path).decode(tokens) if file.tokenizer_path else tokens)


@app.command("check", cls=UsageCommand)
def check(
    paths: Annotated[list[str], typer.Argument(help="Files of tokens, or blend files.")],
    vocab_size: Annotated[int | None, typer.Option("--vocab-size", min=1, help="Tokens that the model has.")] = None,
    max_length: Annotated[int | None, typer.Option("--max-length", min=1, help="Tokens a document may have.")] = None,
) -> None:
    """Read files of tokens whole, compare every checksum, and name all problems."""
    from shoal.data.sources.opening import open_sources
    from shoal.text import counted

    sources, _ = open_sources(paths, vocab_size=vocab_size, max_length=max_length, verify=True)
    for source in sources:
        print(f"{source.name}: {counted(len(source), 'document')}, {int(source.lengths.sum()):,} tokens, no problem")


@app.command("analyse", cls=UsageCommand)
def analyse(
    source: Annotated[str, typer.Argument(help="A file of tokens, or text, which is tokenised first.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the measures.")],
    metrics: Annotated[
        list[str] | None, typer.Option("--metric", help="seqlen or vocabularyrarity; repeat it for both.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Of text: a tokenizer.json, a folder, or hf:NAME.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes that read and measure.")] = 1,
) -> None:
    """Measure every document, for a curriculum or batches by tokens (data_efficiency in the config)."""
    from rich.console import Console
    from rich.progress import Progress

    from shoal.data.analysis import analyse_source
    from shoal.data.sources.opening import open_source

    opened = open_source(source, tokenizer=tokenizer, num_workers=workers)
    chosen = metrics or ["seqlen"]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=len(opened))
        analyse_source(
            opened,
            chosen,
            out,
            workers,
            lambda name, done: progress.update(task, description=name, completed=done),
        )
    print(f"{out}: {', '.join(chosen)} of {len(opened):,} documents")
