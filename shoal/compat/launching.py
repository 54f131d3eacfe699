"""The `deepspeed` command's flags: which ranks, on which machines and devices, and what is run.

    --num_gpus N                    N ranks; on a machine without GPUs they compute on the CPU
    --hostfile, --include, --exclude  machines and their slots; others than this one are reached by ssh
    --no_ssh, --node_rank           this machine's part alone: the command is given on each
    --master_port, --master_addr    where rank 0 listens; left out, a free port
    --module, --no_python           the script is the name of a module; the script is a program
    --bind_cores_to_rank            bind each rank to its own cores (--bind_core_list: of these)
    --no_local_rank                 do not pass --local_rank=N to the script (LOCAL_RANK is set in any case)
    --autotuning tune, run          search for the best configuration; then train with it
    --elastic_training              start all ranks anew when one fails; with --no_ssh also when machines come or go

    localhost slots=4               a hostfile: one machine a line
    localhost:0,2@worker-1          --include and --exclude: machines, each with its slots; no slots: all of them

Slots are the devices that CUDA_VISIBLE_DEVICES shows, by the names that it has for them.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from shoal.compat import machines
from shoal.compat.absent import not_built
from shoal.compat.environment import file_of_variables, for_local_children, showing, visible_devices
from shoal.errors import ConfigError, ShoalError
from shoal.launch import LocalJob, Outcome, RemoteJob, run_local, run_remote
from shoal.launch.local import DEFAULT_PORT, check_script
from shoal.planner.autotuning import Script, autotune

DEEPSPEED_ENVIRONMENT_NAME = file_of_variables()
DEFAULT_HOSTFILE = "/job/hostfile"
HERE = ("localhost", "127.0.0.1")

# Flags that ask for something that is not there, and what to do instead.
NOT_THERE = {
    "enable_each_rank_log": "leave it out: every line of the output starts with its rank.",
    "force_multi": "leave it out: one machine needs no ssh.",
    "venv_script": "activate the environment first.",
}


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with DeepSpeed's flags and defaults."""
    parser = argparse.ArgumentParser(
        prog="shoal deepspeed",
        description="Start a script written for DeepSpeed on local or remote ranks; `import deepspeed` imports Shoal.",
    )
    add = parser.add_argument
    add("-H", "--hostfile", default=DEFAULT_HOSTFILE, help="file with one machine on each line: NAME slots=N")
    add("-i", "--include", default="", help="use only these devices: NAME[:SLOT,...][@NAME...]")
    add("-e", "--exclude", default="", help="use all devices except these: NAME[:SLOT,...][@NAME...]")
    add("--num_nodes", type=int, default=-1, help="use the first N machines; default: all")
    add(
        "--elastic_training", action="store_true", help="restart all ranks when one fails, or a machine joins or leaves"
    )
    add("--min_elastic_nodes", type=int, default=-1, help="wait for at least this many machines; default: 1")
    add("--max_elastic_nodes", type=int, default=-1, help="use at most this many machines; default: all")
    add(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        default=-1,
        help="ranks on each machine; default: one for each device",
    )
    add("--master_port", type=int, default=None, help="port of rank 0; default: a free port on one machine, else 29500")
    add("--master_addr", default="", help="address of rank 0; default: the first machine")
    add("--node_rank", type=int, default=-1, help="number of this machine, with --no_ssh")
    add("--launcher", default="pdsh", help="pdsh or ssh: start ranks by ssh; slurm: by srun")
    add("--launcher_args", default="", help="options for ssh or srun")
    add("--module", action="store_true", help="the script is the name of a module")
    add("--no_python", action="store_true", help="the script is a program")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    add("--no_ssh", action="store_true", help="do not use ssh: run this command on every machine, with --node_rank")
    add("--no_ssh_check", action="store_true", help="no effect: ssh is not tested before the start")
    add("--ssh_port", type=int, default=None, help="port of ssh on the other machines")
    add("--world", default="", help=argparse.SUPPRESS)  # the launching machine passes it to the others
    add("--log_level", default="info", help="no effect")
    add("-q", "--quiet", action="store_true", help="no effect")
    add("--bind_cores_to_rank", action="store_true", help="bind each rank to its own cores")
    add("--bind_core_list", default=None, help="CPUs to use for --bind_cores_to_rank, such as 0-3,8-11")
    add("--save_pid", action="store_true", help="write PID.deepspeed to the folder for temporary files while ranks run")
    add("--force_multi", action="store_true", help=argparse.SUPPRESS)
    add("--venv_script", default=None, help=argparse.SUPPRESS)
    add(
        "--autotuning",
        default="",
        choices=["tune", "run"],
        help="run the script for some steps with one configuration after the other; run: then train with the best",
    )
    add("--enable_each_rank_log", default="None", help=argparse.SUPPRESS)
    add("user_script", help="a Python file, a module (--module) or a program (--no_python)")
    add("user_args", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command and leave with its exit code.

    Raises: ConfigError, NotBuiltError: what the options ask for cannot be done. UsageError: there is no such script.
        SystemExit: otherwise.
    """
    options = parse_args(args)
    job = job_of(options)
    if not options.no_python:
        check_script(options.user_script, is_module=options.module)
    with _pid_file() if options.save_pid else nullcontext():
        if options.autotuning:
            script = _script(options, job, sys.argv[1:] if args is None else args)
            outcome = autotune(script, options.autotuning, lambda text: sys.stdout.write(f"{text}\n"))
        else:
            outcome = run_remote(job) if isinstance(job, RemoteJob) else run_local(job)
    if outcome.report:
        sys.stderr.write(f"\n{outcome.report}\n")
    sys.exit(outcome.exit_code)


def _script(options: argparse.Namespace, job: LocalJob | RemoteJob, words: Sequence[str]) -> Script:
    """What ``--autotuning`` runs: the command ``words`` with other arguments of the script.

    Raises: NotBuiltError: the ranks are on several machines, or are restarted when they fail.
    """
    if not isinstance(job, LocalJob) or job.place is not None or job.elastic is not None:
        raise not_built("--autotuning on several machines or with --elastic_training", "search on one machine.")
    launcher = list(words[: len(words) - len(options.user_args)])
    at = next(index for index, word in enumerate(launcher) if word.startswith("--autotuning"))
    del launcher[at : at + (1 if "=" in launcher[at] else 2)]

    def start(arguments: Sequence[str]) -> Outcome:
        made = job_of(argparse.Namespace(**{**vars(options), "user_args": list(arguments)}))
        assert isinstance(made, LocalJob)
        return run_local(made)

    return Script(("shoal", "deepspeed", *launcher), tuple(options.user_args), job.num_ranks, start)


@contextmanager
def _pid_file() -> Iterator[None]:
    """Inside the block this process's number is in a file that is named after it."""
    path = Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed")
    path.write_text(str(os.getpid()), encoding="utf-8")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def command() -> None:
    """``main`` as a program: an error of Shoal's is a message and exit code 2."""
    try:
        main()
    except ShoalError as error:
        sys.stderr.write(f"shoal deepspeed: {error}\n")
        sys.exit(2)


def job_of(options: argparse.Namespace) -> LocalJob | RemoteJob:
    """What the options ask for. Raises: ConfigError, NotBuiltError."""
    _refuse_what_is_not_there(options)
    has_filter = bool(options.include or options.exclude)
    if has_filter and (options.num_gpus > 0 or options.num_nodes > 0):
        raise ConfigError(
            "--num_gpus and --num_nodes cannot be given together with --include or --exclude.",
            do="count by --num_gpus, or name devices by --include.",
            code="launch-filter",
        )
    hosts = fetch_hostfile(options.hostfile)
    devices = _devices(visible_devices())
    wanted = _wanted(hosts, devices, options)
    if machines.is_several(options, wanted) or any(not _is_here(host) for host in wanted):
        pool = machines.pool_of(options, wanted)
        if machines.is_slurm(options):
            return machines.by_slurm(options, pool, _program(options, passes_rank=False))
        address = machines.address_of(options, pool)
        if options.no_ssh:
            return machines.here(options, pool, address, _program(options), devices)
        return machines.everywhere(options, pool, address, _is_here)
    slots = next(iter(wanted.values()), [])
    if not slots and (devices or hosts or has_filter):
        raise ConfigError("no slot is left for a rank.", do="exclude less.", code="launch-devices")
    count = options.num_gpus if options.num_gpus > 0 else len(slots) or 1
    if devices and count > len(slots):
        raise ConfigError(
            f"--num_gpus {count}, but there are {len(slots)} devices: {', '.join(map(str, slots))}.",
            do=f"give --num_gpus {len(slots)} or less; hide all devices (CUDA_VISIBLE_DEVICES=) to run on the CPU.",
            code="launch-devices",
        )
    environment = for_local_children()
    if devices:
        environment |= showing(slots[:count], devices)
    elastic = machines.elastic_of(options, 1)
    if elastic is None and (options.master_port is not None or options.master_addr):
        environment |= {
            "MASTER_ADDR": options.master_addr or "127.0.0.1",
            "MASTER_PORT": str(options.master_port or DEFAULT_PORT),
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 listens there itself
        }
    cores = machines.cores_of(options, count)
    return LocalJob(_program(options), count, environment=environment, elastic=elastic, cores=cores)


def _wanted(
    hosts: Mapping[str, int], devices: Sequence[int | str], options: argparse.Namespace
) -> dict[str, list[int | str]]:
    """The slots of each machine that are to have ranks; without devices there are as many as a filter names."""
    if not hosts and not devices:
        text = options.include or options.exclude
        named = _slots(",".join(part.partition(":")[2] for part in text.split("@")))
        free: list[int | str] = list(range(max([int(s) + 1 for s in named if isinstance(s, int)], default=1)))
        pool: dict[str, Sequence[int | str]] = {HERE[0]: free if text else []}
    elif len(hosts) <= 1 and devices:
        name, slots = next(iter(hosts.items()), (HERE[0], len(devices)))
        pool = {name: devices[:slots]}
    else:
        pool = {host: range(slots) for host, slots in hosts.items()}
    return parse_resource_filter(pool, options.include, options.exclude)


def _program(options: argparse.Namespace, *, passes_rank: bool = True) -> list[str]:
    """The command line of one rank. ``passes_rank``: the launcher sets LOCAL_RANK."""
    if options.no_python:
        return [options.user_script, *options.user_args]
    return [
        *(sys.executable, "-u", "-m", "shoal.compat.deepspeed"),
        *([] if options.no_local_rank or not passes_rank else ["--local-rank"]),
        *(["-m"] if options.module else []),
        *(options.user_script, *options.user_args),
    ]


def _refuse_what_is_not_there(options: argparse.Namespace) -> None:
    for name, do in NOT_THERE.items():
        if getattr(options, name) not in (None, False, "", "None"):
            raise not_built(f"--{name}", do)
    if options.node_rank >= 0 and not options.no_ssh:
        raise ConfigError(
            f"--node_rank {options.node_rank} without --no_ssh.",
            do="add --no_ssh to start this machine's part alone, or leave --node_rank out.",
            code="launch-machines",
        )


def _devices(visible: str | None) -> list[int | str]:
    """The names of the visible devices; none on a machine without."""
    import torch

    if not torch.accelerator.is_available():
        return []
    if visible is not None:
        return _slots(visible)
    return list(range(torch.accelerator.device_count()))


def _is_here(host: str) -> bool:
    return host in HERE or host.partition(".")[0] == socket.gethostname().partition(".")[0]


def fetch_hostfile(hostfile_path: str) -> dict[str, int]:
    """Slots of each machine, in the file's order; empty without a file at DeepSpeed's default place.

    Raises: ConfigError: no such file, or what ``parse_hostfile`` finds.
    """
    path = Path(hostfile_path)
    if path.is_file():
        return parse_hostfile(path.read_text(encoding="utf-8").splitlines(), hostfile_path)
    if hostfile_path == DEFAULT_HOSTFILE:
        return {}
    raise ConfigError(f"--hostfile {hostfile_path!r}: there is no such file.", code="launch-hostfile")


def parse_hostfile(lines: Sequence[str], name: str = "the hostfile") -> dict[str, int]:
    """Raises: ConfigError: a line that is not ``NAME slots=N``, a machine that is there twice, or no machine at all."""
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"([A-Za-z0-9_][\w.:@%-]*)\s+slots=(\d+)", text, re.ASCII)
        if match is None or match[1] in hosts:
            what = f"{match[1]!r} is there twice" if match is not None else f"{text!r} is not NAME slots=N"
            raise ConfigError(f"{name}, line {number}: {what}.", code="launch-hostfile")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise ConfigError(f"{name} names no machine.", do="write a line NAME slots=N.", code="launch-hostfile")
    return hosts


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> dict[str, list[int | str]]:
    """``parse_resource_filter`` of slots that are numbered from 0 on each machine.

    >>> parse_inclusion_exclusion({"a": 2, "b": 3}, "", "b:1")
    {'a': [0, 1], 'b': [0, 2]}
    """
    return parse_resource_filter({host: range(slots) for host, slots in resource_pool.items()}, inclusion, exclusion)


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int | str]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int | str]]:
    """The slots that ``--include`` or ``--exclude`` leave, in the pool's order.

    Args:
        host_info: the slots of each machine.

    Raises: ConfigError: both are given, or one names what is not there.

    >>> parse_resource_filter({"a": [0, 1], "b": [0]}, include_str="a:1@b")
    {'a': [1], 'b': [0]}
    """
    if include_str and exclude_str:
        raise ConfigError("--include and --exclude are both given.", do="give one of them.", code="launch-filter")
    pool = {host: list(slots) for host, slots in host_info.items()}
    if not include_str and not exclude_str:
        return pool
    named = named_slots(pool, include_str or exclude_str)
    if include_str:
        return {host: [slot for slot in pool[host] if slot in named[host]] for host in pool if host in named}
    left = {host: [slot for slot in slots if slot not in named.get(host, [])] for host, slots in pool.items()}
    return {host: slots for host, slots in left.items() if slots}


def named_slots(pool: Mapping[str, Sequence[int | str]], text: str) -> dict[str, list[int | str]]:
    """What a filter names. Raises: ConfigError: a machine or slot that is not in the pool."""
    named: dict[str, list[int | str]] = {}
    for part in text.split("@"):
        host, _, listed = part.strip().partition(":")
        if host not in pool:
            raise ConfigError(
                f"No hostname {host!r} in this job.", do=f"name one of: {', '.join(pool)}.", code="launch-filter"
            )
        for slot in _slots(listed) or pool[host]:
            if slot not in pool[host]:
                raise ConfigError(
                    f"No slot '{slot}' specified on host '{host}'.",
                    do=f"name some of: {', '.join(map(str, pool[host])) or 'none'}.",
                    code="launch-filter",
                )
            named.setdefault(host, []).append(slot)
    return named


def _slots(text: str) -> list[int | str]:
    """Devices by number, or by the longer names that CUDA has for them."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [int(name) if name.isdigit() else name for name in names]
