"""The start of ``shoal train``: checks the options, then trains in this process or starts the ranks."""

from __future__ import annotations

import dataclasses
import sys
from datetime import datetime
from pathlib import Path

from shoal.cli.job import TrainJob, checkpoint_folder, read_config, run_folder
from shoal.errors import UsageError
from shoal.launch import LocalJob, read_environment, run_local

JOB_FILE = "job.json"


def start(job: TrainJob) -> int:
    """Train on as many local ranks as asked for, or as one of a launcher's ranks; return the exit code.

    Raises: UsageError, ModelError, ConfigError: what can be known to be wrong is said before a rank is started.
    """
    if job.out is None and job.resume is not None:
        job = dataclasses.replace(job, out=str(run_folder(job.resume)))
    if job.out is None:
        job = dataclasses.replace(job, out=str(Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}"))
    _check(job)
    if read_environment().is_launched or job.ranks == 1:
        from shoal.cli.training import train

        train(job)
        return 0
    folder = Path(str(job.out))
    folder.mkdir(parents=True, exist_ok=True)
    job.save(folder / JOB_FILE)
    program = (sys.executable, "-m", "shoal.cli.training", str(folder / JOB_FILE))
    outcome = run_local(LocalJob(program, job.ranks, rank_0_keeps_terminal=True))
    if outcome.report:
        print(f"\n{outcome.report}", file=sys.stderr)
    return outcome.exit_code


def _check(job: TrainJob) -> None:
    """All that can be checked without reading the text or starting a rank."""
    from shoal.data import load_tokenizer

    read_config(job)
    job.shape(load_tokenizer(job.tokenizer).vocab_size)
    if job.resume is not None and not checkpoint_folder(run_folder(job.resume)).is_dir():
        raise UsageError(
            f"--resume {job.resume!r}: there is no folder {checkpoint_folder(run_folder(job.resume))}.",
            do="name the folder of a run that has saved a checkpoint.",
        )
    for source in job.text:
        if not any(mark in source for mark in "*?[") and not Path(source).exists():
            raise UsageError(f"--text {source!r}: no such file or folder.")
