"""Slurm on this machine: a controller and two nodes, ``n1`` and ``n2``, with partitions ``main`` and ``high``.

Jobs of ``high`` preempt those of ``main``. Its daemons are Debian's packages slurmctld, slurmd and munge, run by root.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1
JobRequeue=1
KillWait=20
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first},{second}] CPUs=2 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no Slurm here; empty: there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if os.getuid() != 0:
        return "Slurm's daemons need root"
    return f"{', '.join(absent)} are not installed (Debian: slurmctld slurmd slurm-client munge)" if absent else ""


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Raises: AssertionError: ``condition`` does not become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start the daemons, and end them. Yields: the environment of Slurm's programs."""
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    with ExitStack() as free:
        ports = [free.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(3)]
    names = dict(zip(("controller", "first", "second"), ports, strict=True))
    (folder / "slurm.conf").write_text(_CONFIG.format(host=host, folder=folder, **names))
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = [f"--{name}={folder}/munge.{end}" for name, end in (("key-file", "key"), ("socket", "socket"))]
    munge += [f"--{name}={folder}/munge.{end}" for name, end in (("pid-file", "pid"), ("log-file", "log"))]
    commands = [
        ["munged", "--foreground", "--force", f"--seed-file={folder}/munge.seed", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]

    def output(*command: str) -> str:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    with (folder / "daemons.log").open("w") as log, ExitStack() as daemons:
        for command in commands:
            if command[0] == "slurmctld":
                wait_for((folder / "munge.socket").exists, "munged has not started")
            daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            daemons.callback(daemon.wait)
            daemons.callback(daemon.terminate)
        wait_for(lambda: output("sinfo", "-h", "-N", "-p", "main", "-o", "%t").split() == ["idle"] * 2, "no idle nodes")
        daemons.callback(lambda: wait_for(lambda: output("squeue", "-h") == "", "jobs are left"))
        daemons.callback(output, "scancel", "--user=root")
        yield environment
