"""The `deepspeed` command on several machines: each one's ranks, and the commands that start them there by ssh.

    hosts a slots=2, b slots=4; on the machine where the command is given:

    ssh a  shoal deepspeed --no_ssh --node_rank 0 --master_addr a --master_port 29500 --world ... SCRIPT    ranks 0, 1
    ssh b  shoal deepspeed --no_ssh --node_rank 1 --master_addr a --master_port 29500 --world ... SCRIPT    ranks 2 to 5

``--world`` lists each machine's slots, so that no other machine needs the hostfile. With ``--no_ssh`` a user (or a
scheduler) runs each machine's command there.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal.compat.absent import not_built
from shoal.compat.environment import exported, for_children, showing
from shoal.errors import ConfigError
from shoal.launch import BoundCores, Elastic, LocalJob, Place, RemoteJob, cpu_list, divide_cores, physical_cores
from shoal.launch.local import DEFAULT_PORT

Slot = int | str
Pool = dict[str, list[Slot]]  # the slots of each machine, machine 0 first

BY_SSH = ("pdsh", "ssh")
SLURM = "slurm"


def is_several(options: argparse.Namespace, pool: Mapping[str, Sequence[Slot]]) -> bool:
    """True if the job runs on more than this machine."""
    return options.num_nodes > 1 or options.node_rank >= 0 or bool(options.world) or len(pool) > 1


def pool_of(options: argparse.Namespace, wanted: Mapping[str, Sequence[Slot]]) -> Pool:
    """The machines and slots that ``--num_nodes`` and ``--num_gpus`` leave of those that are wanted.

    Raises: ConfigError: there are fewer, or neither options nor hostfile name them.
    """
    if options.world:
        return {host: list(slots) for host, slots in json.loads(base64.urlsafe_b64decode(options.world)).items()}
    pool = {host: list(slots) for host, slots in wanted.items()}
    if len(pool) <= 1 and options.num_nodes > 1:
        if not (options.no_ssh or is_slurm(options)) or options.num_gpus < 1:
            raise ConfigError(
                f"--num_nodes {options.num_nodes}, and no hostfile says which machines they are.",
                do="give --hostfile; or on every machine --no_ssh, --node_rank, --master_addr and --num_gpus; or"
                " --launcher slurm and --num_gpus.",
                code="launch-machines",
            )
        pool = {f"machine {number}": list(range(options.num_gpus)) for number in range(options.num_nodes)}
    if options.num_nodes > len(pool):
        raise ConfigError(
            f"--num_nodes {options.num_nodes}, but there are {len(pool)} machines: {', '.join(pool)}.",
            do="name more in the hostfile, or ask for fewer.",
            code="launch-machines",
        )
    if options.num_nodes > 0:
        pool = dict(list(pool.items())[: options.num_nodes])
    if options.num_gpus > 0:
        for host, slots in pool.items():
            if len(slots) < options.num_gpus:
                raise ConfigError(
                    f"--num_gpus {options.num_gpus}, but {host} has {len(slots)} slots.",
                    do=f"give --num_gpus {min(map(len, pool.values()))} or less.",
                    code="launch-devices",
                )
        pool = {host: slots[: options.num_gpus] for host, slots in pool.items()}
    return pool


def is_slurm(options: argparse.Namespace) -> bool:
    """True if srun starts the ranks."""
    return str(options.launcher).lower() == SLURM and not options.no_ssh


def by_slurm(options: argparse.Namespace, pool: Pool, program: Sequence[str]) -> RemoteJob:
    """One srun, which starts the ranks of all machines; they find each other by Slurm's variables.

    Args:
        pool: names that begin with "machine " are srun's to choose.

    Raises: ConfigError: there is no srun, or slots that it cannot place: it counts ranks, and gives each machine as
        many. NotBuiltError: an elastic job.
    """
    if elastic_of(options, len(pool)) is not None:
        raise not_built("--elastic_training by srun", "leave it out, and let Slurm requeue the job.")
    counts = {len(slots) for slots in pool.values()}
    if len(counts) > 1 or any(list(slots) != list(range(len(slots))) for slots in pool.values()):
        shown = "; ".join(f"{host}: {', '.join(map(str, slots))}" for host, slots in pool.items())
        raise ConfigError(
            f"srun cannot place ranks on these slots: {shown}.",
            do="give every machine the same number of slots, the first ones of each.",
            code="launch-slurm",
        )
    if shutil.which("srun") is None:
        raise ConfigError(
            "--launcher slurm, and there is no program srun here.",
            do="give the command where Slurm's client is installed, or leave --launcher out.",
            code="launch-slurm",
        )
    per_node = counts.pop()
    named = [] if next(iter(pool)).startswith("machine ") else ["--nodelist", ",".join(pool)]
    environment = for_children() | exported([Path.home(), Path.cwd()])
    if options.master_addr:
        environment["MASTER_ADDR"] = options.master_addr
    if options.master_port is not None:
        environment["MASTER_PORT"] = str(options.master_port)
    command = [
        *("srun", "--nodes", str(len(pool)), "--ntasks", str(len(pool) * per_node)),
        *("--ntasks-per-node", str(per_node), *named, "--export=ALL", *shlex.split(options.launcher_args), *program),
    ]
    return RemoteJob({"srun": command}, here=frozenset({"srun"}), folder=os.getcwd(), environment=environment)


def address_of(options: argparse.Namespace, pool: Pool) -> tuple[str, int]:
    """The address of machine 0. Raises: ConfigError: no name is given by which the others reach it."""
    first = next(iter(pool))
    if options.master_addr:
        address = options.master_addr
    elif first == "localhost" or first.startswith(("127.", "machine ")):
        raise ConfigError(
            f"the other machines cannot reach the first one by the name {first!r}.",
            do="give --master_addr a name or address that they have for it, or name it so in the hostfile.",
            code="launch-machines",
        )
    else:
        address = first
    return address, options.master_port or DEFAULT_PORT


def here(
    options: argparse.Namespace,
    pool: Pool,
    address: tuple[str, int],
    program: Sequence[str],
    devices: Sequence[Slot],
) -> LocalJob:
    """This machine's part (``--no_ssh``).

    Args:
        devices: the names of this machine's visible devices; slots count them.

    Raises: ConfigError: no such machine, or devices that are not there.
    """
    if not 0 <= options.node_rank < len(pool):
        raise ConfigError(
            f"--node_rank {options.node_rank} of {len(pool)} machines.",
            do=f"with --no_ssh give each machine its own of 0 to {len(pool) - 1}.",
            code="launch-machines",
        )
    host = list(pool)[options.node_rank]
    slots = pool[host]
    environment = for_children()
    if devices:
        named = [devices[slot] if isinstance(slot, int) and slot < len(devices) else slot for slot in slots]
        missing = [slot for slot in named if slot not in devices]
        if missing:
            raise ConfigError(
                f"{host} is to use slots {', '.join(map(str, slots))}, and has {len(devices)} devices.",
                do="give it fewer slots in the hostfile.",
                code="launch-devices",
            )
        environment |= showing(named, devices)
    elastic = elastic_of(options, len(pool))
    most = options.max_elastic_nodes if options.max_elastic_nodes > 0 else len(pool)
    place = Place(options.node_rank, most, *address)
    cores = cores_of(options, len(slots))
    return LocalJob(program, len(slots), environment=environment, place=place, elastic=elastic, cores=cores)


def cores_of(options: argparse.Namespace, num_ranks: int) -> BoundCores | None:
    """The CPUs of each rank on this machine (``--bind_cores_to_rank``); None: ranks are not bound.

    Raises: ConfigError: CPUs that are not there, or fewer cores than ranks.
    """
    if not options.bind_cores_to_rank and options.bind_core_list is None:
        return None
    wanted = None if options.bind_core_list is None else cpu_list(options.bind_core_list)
    return divide_cores(physical_cores(wanted), num_ranks)


def elastic_of(options: argparse.Namespace, num_nodes: int) -> Elastic | None:
    """The settings of ``--elastic_training``; None without it.

    Raises: ConfigError: bounds that no number of machines fulfils, or bounds without ``--elastic_training``.
    """
    low, high = options.min_elastic_nodes, options.max_elastic_nodes
    given = [f"--{name}_elastic_nodes {value}" for name, value in (("min", low), ("max", high)) if value != -1]
    if not options.elastic_training:
        if given:
            raise ConfigError(
                f"{' '.join(given)} without --elastic_training.",
                do="add --elastic_training, or leave them out.",
                code="launch-elastic",
            )
        return None
    low, high = low if low != -1 else 1, high if high != -1 else num_nodes
    if not 1 <= low <= high <= num_nodes:
        raise ConfigError(
            f"--elastic_training on {low} to {high} of {num_nodes} machines.",
            do=f"give 1 <= --min_elastic_nodes <= --max_elastic_nodes <= {num_nodes}.",
            code="launch-elastic",
        )
    return Elastic(min_nodes=low)


def everywhere(
    options: argparse.Namespace, pool: Pool, address: tuple[str, int], is_here: Callable[[str], bool]
) -> RemoteJob:
    """The command of every machine. Raises: NotBuiltError: a launcher that is not ssh; an elastic job."""
    if elastic_of(options, len(pool)) is not None:
        raise not_built(
            "--elastic_training by ssh",
            "give the command on every machine, with --no_ssh --node_rank N --master_addr ADDRESS: by ssh, the first"
            " machine that goes ends the job.",
        )
    if options.launcher.lower() not in BY_SSH:
        raise not_built(
            f"--launcher {options.launcher}",
            "take slurm, or start `mpirun python -m shoal.compat.deepspeed SCRIPT` yourself.",
        )
    world = base64.urlsafe_b64encode(json.dumps(pool).encode()).decode()
    passed_on = ("module", "no_python", "no_local_rank", "bind_cores_to_rank")
    flags = [f"--{name}" for name in passed_on if getattr(options, name)]
    flags += [] if options.bind_core_list is None else ["--bind_core_list", options.bind_core_list]
    commands = {
        host: [
            *(sys.executable, "-u", "-m", "shoal", "deepspeed", "--no_ssh", "--node_rank", str(number)),
            *("--master_addr", address[0], "--master_port", str(address[1]), "--world", world),
            *(*flags, options.user_script, *options.user_args),
        ]
        for number, host in enumerate(pool)
    }
    ssh = ["-p", str(options.ssh_port)] if options.ssh_port is not None else []
    return RemoteJob(
        commands,
        here=frozenset(host for host in pool if is_here(host)),
        folder=os.getcwd(),
        environment=exported([Path.home(), Path.cwd()]),
        ssh_options=[*ssh, *shlex.split(options.launcher_args)],
    )
