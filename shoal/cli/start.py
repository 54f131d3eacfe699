"""The start of ``shoal train``: checks the options, then trains in this process or starts the ranks."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from shoal.checkpoint.directory import list_checkpoints
from shoal.checkpoint.storage import open_storage
from shoal.cli.job import (
    CHECKPOINTS,
    JOB_FILE,
    TrainJob,
    checkpoint_folder,
    default_ranks,
    describe_shape,
    read_config,
    run_folder,
)
from shoal.comm.environment import is_first_process, read_launch
from shoal.errors import UsageError
from shoal.launch import LocalJob, run_local
from shoal.observe.goodput import GOODPUT_FILE
from shoal.observe.report import METRICS_FILE, REPORT_FILE, RUN_FILE

_SHAPE = ("model", "parameters", "layers", "hidden", "heads", "vocab", "sequence", "experts", "top_k")
_STOP_SECONDS = 60  # for a save after Ctrl-C; a second Ctrl-C ends the ranks at once
_LIMITS = ("steps", "minutes")
_OF_ONE_COMMAND = ("resume", "out", "verbose", "command")  # a resumed run does not take these from the earlier command
_WRITTEN = (JOB_FILE, CHECKPOINTS, METRICS_FILE, GOODPUT_FILE, RUN_FILE, REPORT_FILE, "csv", "tensorboard")


def start(job: TrainJob, *, overwrites: bool = False) -> int:
    """Train on as many local ranks as asked for, or as one of a launcher's ranks; return the exit code.

    Args:
        overwrites: remove the run that is in the folder; otherwise it is an error.

    Raises: UsageError, ModelError, ConfigError: what can be known to be wrong is said before a rank is started.
    """
    changes: list[str] = []
    if job.resume is not None:
        job, changes = _with_saved(job, job.resume)
    if job.out is None:
        job = dataclasses.replace(job, out=str(Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}"))
    job = dataclasses.replace(job, ranks=job.ranks or default_ranks())
    _check(job)
    if is_first_process():
        _make_room(job, overwrites=overwrites)
        if changes:
            print(f"--resume {job.resume}: {', '.join(changes)}")
    if job.resume is not None and (why := _why_it_is_over(job, run_folder(job.resume))):
        print(f"--resume {job.resume}: nothing is left to do: {why}. Give larger --steps or --minutes to go on.")
        return 0
    if read_launch() is not None or job.ranks == 1:
        from shoal.cli.training import train

        train(job)
        return 0
    folder = Path(str(job.out))
    job.save(folder / JOB_FILE)
    program = (sys.executable, "-m", "shoal.cli.training", str(folder / JOB_FILE))
    outcome = run_local(LocalJob(program, job.ranks or 1, rank_0_keeps_terminal=True, stop_seconds=_STOP_SECONDS))
    if outcome.report:
        print(f"\n{outcome.report}", file=sys.stderr)
    return outcome.exit_code


def _saved_job(resume: str) -> TrainJob | None:
    """The options of the run that ``--resume`` names; None: its folder has no file of them."""
    path = run_folder(resume) / JOB_FILE
    return TrainJob.load(path) if path.is_file() else None


def _with_saved(job: TrainJob, resume: str) -> tuple[TrainJob, list[str]]:
    """The job with the options of the run that it resumes, where the command line gives none; and what it changes."""
    out = str(run_folder(resume)) if job.out is None else job.out
    if (saved := _saved_job(resume)) is None:
        return dataclasses.replace(job, out=out), []
    options = {name: value for name, value in dataclasses.asdict(job).items() if name not in _OF_ONE_COMMAND}
    given = {name: value for name, value in options.items() if value is not None}
    replaced = {*given, *(_LIMITS if given.keys() & {*_LIMITS} else ())}
    if given.keys() & {"model", "parameters"}:
        replaced |= {*_SHAPE}
    kept = {name: getattr(saved, name) for name in options if name not in replaced}
    changes = []
    for name, value in given.items():
        if (before := getattr(saved, name)) != value and name not in _SHAPE:
            instead = "the default" if before is None else before
            changes.append(f"--{name.replace('_', '-')} {value} in place of {instead}")
    return dataclasses.replace(job, **kept, out=out), changes


def _why_it_is_over(job: TrainJob, run: Path) -> str:
    """Why the run has no step left; empty: it has, or there is no whole checkpoint to read it from."""
    checkpoints = list_checkpoints(open_storage(checkpoint_folder(run)))
    if not checkpoints or (manifest := checkpoints[0].manifest) is None:
        return ""
    if job.steps is not None and manifest.step >= job.steps:
        return f"the run is at step {manifest.step:,} and ends at step {job.steps:,}"
    elapsed = manifest.client_state.get("elapsed", 0.0)
    if job.seconds is not None and elapsed >= job.seconds:
        return f"the run has trained for {elapsed / 60:.1f} minutes and ends after {job.seconds / 60:.1f}"
    return ""


def _make_room(job: TrainJob, *, overwrites: bool) -> None:
    """Remove an earlier run from the folder of a new one. Raises: UsageError: it may not be removed."""
    folder = Path(str(job.out))
    present = [folder / name for name in _WRITTEN if (folder / name).exists()]
    if not present or (job.resume is not None and folder.resolve() == run_folder(job.resume).resolve()):
        return
    if not overwrites:
        raise UsageError(
            f"--out {str(folder)!r} already contains a run ({', '.join(path.name for path in present)}).",
            do=f"name another folder, continue that run with --resume {folder}, or replace it with --overwrite.",
        )
    for path in present:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check(job: TrainJob) -> None:
    """All that can be checked without reading plain text or starting a rank. Other sources are opened, so that this
    process alone makes tokens of text.
    """
    from shoal.config import load
    from shoal.data import load_tokenizer

    read_config(job)
    if job.config is not None:
        load(job.config)
    shape = job.shape(load_tokenizer(job.tokenizer).vocab_size)
    if job.resume is not None and not checkpoint_folder(run_folder(job.resume)).is_dir():
        raise UsageError(
            f"--resume {job.resume!r}: there is no folder {checkpoint_folder(run_folder(job.resume))}.",
            do="name the folder of a run that has saved a checkpoint.",
        )
    if job.resume is not None and (saved := _saved_job(job.resume)) is not None:
        was = saved.shape(shape.vocab_size)
        if shape != dataclasses.replace(was, sequence_length=shape.sequence_length):
            raise UsageError(
                f"--resume {job.resume!r}: the model of the run is {describe_shape(was)}, and the options ask for"
                f" {describe_shape(shape)}.",
                do="leave out the options of the model: --resume takes those of the run.",
            )
    sources, _ = job.open_sources(shape)
    names = () if sources else job.text or ()
    missing = [name for name in names if not any(mark in name for mark in "*?[") and not Path(name).exists()]
    if missing:
        raise UsageError(f"--text {', '.join(map(repr, missing))}: no such file or folder.")
    _check_writable(Path(str(job.out)))


def _check_writable(folder: Path) -> None:
    """Make the folder of a run. Raises: UsageError: it cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--out {str(folder)!r}: {error.strerror}.", do="name a folder that can be written.") from None
