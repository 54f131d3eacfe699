"""``shoal convert``: weights and checkpoints from one format to another, one tensor at a time."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from shoal.cli.usage import checkpoints_of, exit_code_of
from shoal.errors import CheckpointError, ShoalError, UsageError
from shoal.text import counted, format_bytes

if TYPE_CHECKING:
    from shoal.checkpoint.portable import Source


_RESUMED = ("counters (step)", "learning-rate schedule")  # that most runs have


Target = StrEnum("Target", "shoal huggingface state_dict dcp fp32 deepspeed deepspeed_universal")
Origin = StrEnum("Origin", "shoal deepspeed huggingface state_dict dcp")
Dtype = StrEnum("Dtype", "float32 bfloat16 float16")


class Loading(NamedTuple):
    """The DeepSpeed run that will load the checkpoint. None: as the run that saved the source."""

    ranks: int | None
    stage: int | None
    config: Path | None
    row_parallel: tuple[str, ...]


def convert(
    source: Annotated[str, typer.Argument(help="Folder or file of a checkpoint, or a run.", callback=checkpoints_of)],
    target: Annotated[str, typer.Argument(help="Folder or file to write; it must not exist.")],
    to: Annotated[Target, typer.Option(help="Format to write; fp32 is the format of DeepSpeed's zero_to_fp32.")],
    from_: Annotated[Origin | None, typer.Option("--from", help="Format of SOURCE; default: detected.")] = None,
    tag: Annotated[str | None, typer.Option(help="Name of the checkpoint in the folder; default: the newest.")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype of the written weights. Default: the model's own; fp32: float32.")
    ] = None,
    max_file_gb: Annotated[
        float, typer.Option("--max-file-gb", min=0.001, help="Largest size of one safetensors file, in 10^9 bytes.")
    ] = 5.0,
    ranks: Annotated[
        int | None,
        typer.Option(help="--to deepspeed: data-parallel ranks that will load it. Default: as many as saved it."),
    ] = None,
    stage: Annotated[
        int | None,
        typer.Option(help="--to deepspeed*: ZeRO stage of the run that will load it. Default: the configuration's."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="--to deepspeed*: JSON configuration of the run that will load it. Default: that of the source."
        ),
    ] = None,
    row_parallel: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX",
            help="--to deepspeed_universal: names of weights that a model which splits its own tensors (Megatron's)"
            " splits along dim 1; others along dim 0. AutoTP needs none. Repeatable.",
        ),
    ] = None,
) -> None:
    """Convert a checkpoint: Shoal's or DeepSpeed's, safetensors, a state_dict, or torch.distributed.checkpoint's.

    Shoal's, DeepSpeed's and torch.distributed.checkpoint's formats keep the optimizer; the others hold the model alone.
    Peak memory is one tensor.
    """
    # Without a terminal lines are not truncated.
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        loading = Loading(ranks, stage, config, tuple(row_parallel or ()))
        _check_loading(to, loading)
        notes = _convert(console, source, target, to, from_, tag, dtype, max_file_gb, loading)
    except ShoalError as error:
        console.print(f"[red]{escape(str(error))}[/red]")
        raise typer.Exit(exit_code_of(error)) from None
    for note in notes:
        console.print(f"note: {escape(note)}")
    print(target)


def _check_loading(to: Target, loading: Loading) -> None:
    """Raises: UsageError: an option that the target does not take."""
    taken = {
        Target.deepspeed: ("ranks", "stage", "config"),
        Target.deepspeed_universal: ("stage", "config", "row_parallel"),
    }
    given = [name for name, value in loading._asdict().items() if value not in (None, ())]
    wrong = ["--" + name.replace("_", "-") for name in given if name not in taken.get(to, ())]
    if wrong:
        what = f"--to {to.value} takes no {' and no '.join(wrong)}: it describes the DeepSpeed run that will load it."
        do = "leave it out."
        if to is Target.deepspeed_universal:
            do = "leave it out; a universal checkpoint is for any number of ranks."
        raise UsageError(what, do=do, code="checkpoint-format")


def _convert(
    console: Console,
    source: str,
    target: str,
    to: Target,
    from_: Origin | None,
    tag: str | None,
    dtype: Dtype | None,
    max_file_gb: float,
    loading: Loading,
) -> list[str]:
    """Returns: a sentence for each part of the source that the target does not contain."""
    from shoal.checkpoint.formats import Format, detect, open_source, unread_weights
    from shoal.checkpoint.formats.target import check_free
    from shoal.checkpoint.manifest import MODEL
    from shoal.checkpoint.tree import dtype_of
    from shoal.checkpoint.watched import nbytes_of, watched

    keeps_all = to in (Target.shoal, Target.dcp, Target.deepspeed, Target.deepspeed_universal)
    if dtype is not None and keeps_all:
        raise CheckpointError(
            f"--dtype casts weights for use, and {to.value} keeps them for training, as they are.",
            do="leave --dtype out, or convert to huggingface or state_dict.",
            code="checkpoint-format",
        )
    if dtype not in (None, Dtype.float32) and to is Target.fp32:
        raise CheckpointError(
            f"--to fp32 writes float32, and --dtype is {dtype.value}.",
            do="leave --dtype out, or convert to state_dict, which takes it.",
            code="checkpoint-format",
        )
    check_free(target)
    source_format: Format = from_.value if from_ is not None else detect(source, tag)
    opened = open_source(source, tag, source_format)
    for line in _what_is_read(opened, source_format, source, unread_weights(source, source_format)):
        console.print(escape(line))
    kinds = [kind for kind in opened.kinds() if keeps_all or kind == MODEL]
    number = sum(len(opened.tensors(kind)) for kind in kinds)
    name = dtype.value if dtype is not None else "float32" if to is Target.fp32 else None
    chosen = dtype_of(name) if name is not None else None
    total = nbytes_of(opened, kinds)
    how = "with their dtypes" if name is None else f"written as {name}"
    console.print(f"{source_format} to {to.value}: {counted(number, 'tensor')}, {format_bytes(total)}, {how}")
    notes: list[str] = []
    with watched(opened, kinds, console) as reading:
        if to is Target.huggingface:
            from shoal.checkpoint.formats.huggingface import write_huggingface

            write_huggingface(reading, target, dtype=chosen, max_file_nbytes=max_file_gb * 1e9)
        elif to is Target.dcp:
            from shoal.checkpoint.formats.dcp_writing import write_dcp

            write_dcp(reading, target)
        elif to is Target.shoal:
            from shoal.checkpoint.native import write_shoal

            write_shoal(reading, target, tag)
        elif to in (Target.deepspeed, Target.deepspeed_universal):
            from shoal.compat.checkpoints.universal import write_deepspeed_universal
            from shoal.compat.checkpoints.writing import write_deepspeed
            from shoal.config.source import open_source as open_config

            ranks, stage, path, row_parallel = loading
            config = open_config(path)[0].value if path is not None else None
            if to is Target.deepspeed:
                notes = write_deepspeed(reading, target, num_ranks=ranks, stage=stage, config=config, tag=tag)
            else:
                notes = write_deepspeed_universal(
                    reading, target, stage=stage, config=config, tag=tag, row_parallel=row_parallel
                )
        else:
            from shoal.checkpoint.formats.plain import write_plain

            write_plain(reading, target, chosen)
    if to is Target.shoal:
        left_out = _not_there(opened)
    else:
        left_out = [] if keeps_all and to is not Target.dcp else _left_out(opened, to)
    return [*opened.about.notes, *notes, *left_out]


def _what_is_read(opened: Source, source_format: str, source: str, unread: list[str]) -> list[str]:
    """A line about the checkpoint that is read, then a line about weights next to it that are not."""
    from shoal.checkpoint.directory import read_latest
    from shoal.checkpoint.storage import open_storage

    about, states = opened.about, _states(opened)
    said = [f"reads {source_format}: {about.path}"]
    said += [f"step {about.counters['global_steps']}"] if "global_steps" in about.counters else []
    said += [f"saved by {counted(about.num_ranks, 'rank')}"] if about.num_ranks is not None else []
    said += [f"with optimizer state ({', '.join(states)})" if states else "without optimizer state"]
    lines = [", ".join(said)]
    if unread:
        shown = ", ".join(unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
        other = "huggingface" if ".safetensors" in unread[0] else "state_dict"
        lines.append(f"not read: {shown}, next to it (--from {other} reads the weights alone)")
    storage = open_storage(source)
    if source_format in ("huggingface", "state_dict") and (tag := read_latest(storage)) and tag not in storage.names():
        lines.append(f"latest names {tag!r}, which does not exist; the weights next to it are read instead")
    return lines


def _states(source: Source) -> list[str]:
    return [kind.partition("/")[2] for kind in source.kinds() if kind != "model"]


def _left_out(source: Source, to: Target) -> list[str]:
    """The parts of the source that the target's format cannot store."""
    notes = []
    if to is not Target.dcp and (states := _states(source)):
        notes.append(f"optimizer state ({', '.join(states)}) has no place in {to.value}; left out.")
    if lost := [name for name, value in _other_parts(source).items() if value]:
        notes.append(f"{to.value} has no place for {', '.join(lost)}; left out.")
    return notes


def _not_there(source: Source) -> list[str]:
    """What a run that resumes begins anew, because the source does not have it."""
    missing = [] if _states(source) else ["optimizer state"]
    missing += [name for name, value in _other_parts(source).items() if not value and name in _RESUMED]
    return [f"the source has no {', no '.join(missing)}: a run that resumes begins with new ones."] if missing else []


def _other_parts(source: Source) -> dict[str, Any]:
    about = source.about
    return {
        "counters (step)": about.counters,
        "learning-rate schedule": about.schedule,
        "loss scale": about.loss_scale,
        "client state": about.client_state,
    }
