"""``shoal run``: a script's ranks on this machine, this machine's part of a job on several, or a job on a cluster."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from shoal.cli.job import VERBOSE, default_ranks
from shoal.errors import UsageError
from shoal.launch import ClusterJob, LocalJob, Outcome, Place, Program, run_local
from shoal.launch.clusters import Target
from shoal.launch.local import DEFAULT_PORT

AutotuningMode = StrEnum("AutotuningMode", "tune run")
_SEVERAL = "Several machines"
_CLUSTER = "Clusters: with --slurm or --print"
_STOP_SECONDS = 5


def run(
    script: Annotated[str, typer.Argument(help="A Python file, or with --module the name of a module.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="Ranks of each machine. Default: one per visible GPU, else 1."),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="Run SCRIPT as a module, like python -m.")] = False,
    as_deepspeed: Annotated[
        bool,
        typer.Option(
            "--as-deepspeed",
            help="`import deepspeed` imports Shoal, also in child processes. SCRIPT may be a launcher (accelerate).",
        ),
    ] = False,
    autotuning: Annotated[
        AutotuningMode | None,
        typer.Option(
            help="Run SCRIPT for some steps with one configuration after the other, as the section autotuning of the"
            " file says that --deepspeed or --deepspeed_config names (tune), then train with the best (run). Implies"
            " --as-deepspeed."
        ),
    ] = None,
    verbose: Annotated[bool, VERBOSE] = False,
    stop_seconds: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seconds from SIGTERM to SIGKILL when ranks are terminated, so that they can save. Default: 5; on a"
            " cluster 120.",
        ),
    ] = None,
    bind_cores: Annotated[
        bool,
        typer.Option(
            "--bind-cores",
            help="Bind each rank to cores of its own, on a machine with GPUs to some of its GPU's NUMA node.",
        ),
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Machines of the job.", rich_help_panel=_SEVERAL)] = 1,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="Number of this machine; 0 is the first.", rich_help_panel=_SEVERAL)
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option(help="Host name or address of machine 0.", rich_help_panel=_SEVERAL)
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port of machine 0. Default: 29500, with --slurm by job.", rich_help_panel=_SEVERAL
        ),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Write an sbatch script and submit it.", rich_help_panel=_CLUSTER)
    ] = False,
    print_: Annotated[
        Target | None,
        typer.Option("--print", help="Print what would be submitted, and exit.", rich_help_panel=_CLUSTER),
    ] = None,
    **cluster: Any,
) -> None:
    """Start a script on several ranks, one process each: here, on this machine of several, or on a cluster."""
    from shoal.cli.as_deepspeed import become_command, is_command, job_as_deepspeed
    from shoal.launch.cores import cores_near, describe_cores, pci_addresses
    from shoal.launch.environment import LOG_LEVEL
    from shoal.launch.local import check_script, misplaced_ranks

    given = args or []
    as_deepspeed = as_deepspeed or autotuning is not None
    wanted: dict[str, Any] = {}
    for name, value in cluster.items():
        if value not in (None, []):
            wanted[name] = tuple(value) if isinstance(value, list) else value
    job = ClusterJob(**wanted)
    if slurm or print_ is not None:
        if autotuning is not None or node_rank is not None:
            raise UsageError("--autotuning and --node-rank are not for a cluster.", do="leave them out.")
        if ranks is None and not job.gpus:
            raise UsageError("a cluster's node has no GPUs to count here.", do="give --ranks or --gpus: of each node.")
        options = [*(["--as-deepspeed"] if as_deepspeed else []), *(["--verbose"] if verbose else [])]
        options += ["--bind-cores"] if bind_cores else []
        program = Program(
            script,
            given,
            is_module=module,
            options=options,
            num_nodes=nodes,
            ranks_per_node=ranks or job.gpus or 1,
            stop_seconds=stop_seconds,
            python=sys.executable,
            address=master_addr,
            port=master_port,
        )
        raise typer.Exit(_on_cluster(job, program, print_, submits=slurm))
    if wanted:
        unused = " ".join(f"--{name.replace('_', '-')}" for name in wanted)
        raise UsageError(f"{unused} without a cluster.", do="add --slurm, or --print with a target.")
    place = _place(nodes, node_rank, master_addr, master_port)
    if place is not None and autotuning is not None:
        raise UsageError("--autotuning on several machines.", do="search on one machine.")
    if as_deepspeed and not module and is_command(script):
        if autotuning is not None:
            raise UsageError(f"--autotuning for the command {script!r}.", do="name the script that trains.")
        become_command(script, given, ranks)
    num_ranks = ranks or default_ranks()
    check_script(script, is_module=module)
    if not module and (advice := misplaced_ranks(script, given)):
        print(advice, file=sys.stderr)
    cores = None
    if bind_cores:
        devices = pci_addresses()
        cores = cores_near(devices, num_ranks)
        print(describe_cores(cores, devices), file=sys.stderr)

    def start(words: Sequence[str]) -> Outcome:
        if as_deepspeed:
            job = job_as_deepspeed(script, words, is_module=module, ranks=num_ranks)
        else:
            job = LocalJob([sys.executable, *(["-m"] if module else []), script, *words], num_ranks)
        if verbose:
            job = replace(job, environment={**job.environment, LOG_LEVEL: "debug"})
        seconds = _STOP_SECONDS if stop_seconds is None else stop_seconds
        return run_local(replace(job, stop_seconds=seconds, place=place, cores=cores))

    if autotuning is None:
        outcome = start(given)
    else:
        from shoal.planner.autotuning import Script, autotune

        command = ("shoal", "run", "--as-deepspeed", "--ranks", str(num_ranks), *(["-m"] if module else []), script)
        outcome = autotune(Script(command, tuple(given), num_ranks, start), autotuning, partial(print, flush=True))
    if outcome.report:
        print(f"\n{outcome.report}", file=sys.stderr)
    raise typer.Exit(outcome.exit_code)


def _place(num_nodes: int, node_rank: int | None, address: str | None, port: int | None) -> Place | None:
    """This machine among several; None: there is this one.

    Raises: UsageError: some of the options are missing, or there is no such machine.
    """
    if num_nodes == 1 and node_rank in (None, 0):
        return None
    if node_rank is None or address is None:
        raise UsageError(
            f"--nodes {num_nodes} without --node-rank and --master-addr.",
            do="give the command on every machine, with its --node-rank and machine 0's --master-addr; or --slurm.",
        )
    if node_rank >= num_nodes:
        raise UsageError(f"--node-rank {node_rank} of --nodes {num_nodes}.", do=f"give 0 to {num_nodes - 1}.")
    return Place(node_rank, num_nodes, address, port or DEFAULT_PORT)


def _on_cluster(job: ClusterJob, program: Program, target: Target | None, *, submits: bool) -> int:
    """Print what starts the job, or write it to a file that sbatch submits. Returns: the exit code.

    Raises: UsageError: the script or sbatch is not there, or what ``render`` raises.
    """
    from shoal.launch.clusters import job_name, render
    from shoal.launch.environment import passed_on
    from shoal.launch.local import check_script

    if submits and target not in (None, Target.slurm):
        raise UsageError(f"--slurm and --print {target}.", do="give one of them.")
    if job.image is None:  # else the script is in the image
        check_script(program.script, is_module=program.is_module)
    text = render(target or Target.slurm, job, program, passed_on(job.env or ()))
    if target is not None:
        print(text, end="")
        return 0
    if (sbatch := shutil.which("sbatch")) is None:
        raise UsageError(
            "--slurm, and there is no program sbatch here.",
            do="give the command on a login node; --print slurm shows the script.",
            code="launch-slurm",
        )
    path = Path(f"{job_name(job, program)}.sbatch")
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}", flush=True)
    return subprocess.run([sbatch, str(path)], check=False).returncode


def _parameters() -> Iterator[inspect.Parameter]:
    """The options of the command: its own, and the fields of ``ClusterJob``."""
    own = inspect.signature(run, eval_str=True).parameters.values()
    yield from (each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD)
    hints = get_type_hints(ClusterJob)
    for each in fields(ClusterJob):
        kind = hints[each.name]
        kind = list[str] | None if kind == tuple[str, ...] | None else kind  # typer takes no tuple of any length
        targets = each.metadata["targets"]
        only = "" if len(targets) == len(Target) else f" For {', '.join(targets)}."
        annotated: Any = Annotated
        option = typer.Option(help=each.metadata["help"] + only, rich_help_panel=_CLUSTER, **each.metadata["limits"])
        yield inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotated[kind, option]
        )


run.__signature__ = inspect.Signature([*_parameters()])  # type: ignore[attr-defined]  # which typer reads
