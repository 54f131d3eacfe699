"""The start of ``shoal train``: checks the options, then trains in this process or starts the ranks."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from shoal.cli.job import JOB_FILE, TrainJob, checkpoint_folder, describe_shape, read_config, run_folder
from shoal.errors import UsageError
from shoal.launch import LocalJob, read_environment, run_local

_SHAPE = ("model", "parameters", "layers", "hidden", "heads", "vocab", "sequence", "experts", "top_k")


def start(job: TrainJob) -> int:
    """Train on as many local ranks as asked for, or as one of a launcher's ranks; return the exit code.

    Raises: UsageError, ModelError, ConfigError: what can be known to be wrong is said before a rank is started.
    """
    if job.resume is not None:
        job = _with_saved(job, job.resume)
    if job.out is None:
        job = dataclasses.replace(job, out=str(Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}"))
    _check(job)
    if read_environment().is_launched or job.ranks == 1:
        from shoal.cli.training import train

        train(job)
        return 0
    folder = Path(str(job.out))
    job.save(folder / JOB_FILE)
    program = (sys.executable, "-m", "shoal.cli.training", str(folder / JOB_FILE))
    outcome = run_local(LocalJob(program, job.ranks, rank_0_keeps_terminal=True))
    if outcome.report:
        print(f"\n{outcome.report}", file=sys.stderr)
    return outcome.exit_code


def _saved_job(resume: str) -> TrainJob | None:
    """The options of the run that ``--resume`` names; None: its folder has no file of them."""
    path = run_folder(resume) / JOB_FILE
    return TrainJob.load(path) if path.is_file() else None


def _with_saved(job: TrainJob, resume: str) -> TrainJob:
    """The job with the folder, model, tokenizer and text of the run that it resumes, where no option gives them."""
    out = str(run_folder(resume)) if job.out is None else job.out
    if (saved := _saved_job(resume)) is None:
        return dataclasses.replace(job, out=out)
    names = () if job.model is not None or job.parameters is not None else _SHAPE
    taken = {name: getattr(saved, name) for name in (*names, "tokenizer") if getattr(job, name) is None}
    return dataclasses.replace(job, **taken, text=job.text or saved.text, out=out)


def _check(job: TrainJob) -> None:
    """All that can be checked without reading the text or starting a rank."""
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
    for source in job.text:
        if not any(mark in source for mark in "*?[") and not Path(source).exists():
            raise UsageError(f"--text {source!r}: no such file or folder.")
    _check_writable(Path(str(job.out)))


def _check_writable(folder: Path) -> None:
    """Make the folder of a run. Raises: UsageError: it cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--out {str(folder)!r}: {error.strerror}.", do="name a folder that can be written.") from None
