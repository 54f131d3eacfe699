"""``shoal deepspeed`` on several machines, which are this one: behind an ``ssh`` that runs here what it is given."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do
[ "$1" != -- ] || { shift; break; }
case "$1" in -o|-p) shift 2 ;; *) shift ;; esac; done
echo "$1" >> "SEEN"
shift
cd / && exec sh -c "$*"
"""
SCRIPT = """
import json, os, sys
import deepspeed, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
engine, *_ = deepspeed.initialize(model=model, config=config)
x = torch.full((2, 4), float(engine.global_rank + 1))
engine.backward(engine(x).sum()); engine.step()
weight = engine.module.weight.detach().tolist()
local, extra = os.environ["LOCAL_WORLD_SIZE"], os.environ.get("GLOO_EXTRA")
with open(f"{sys.argv[2]}/{engine.global_rank}.json", "w") as file:
    json.dump([weight, engine.world_size, local, sys.argv[1], os.getcwd(), extra], file)
"""

WAITS = """
import os, sys, time
with open(f"{sys.argv[2]}/pid{os.environ['RANK']}", "w") as file:
    file.write(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def machines(tmp_path: Path) -> tuple[Path, dict[str, str], list[str]]:
    """A folder, an environment and the launcher's command for two machines with one and two ranks."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(SSH.replace("SEEN", str(tmp_path / "seen")))
    (programs / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("machine-a slots=1\nmachine-b slots=2\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_EXTRA": "went along",
    }
    command = [sys.executable, "-m", "shoal", "deepspeed", "--hostfile", str(tmp_path / "hosts")]
    return tmp_path, environment, [*command, "--master_addr", "127.0.0.1", "--master_port", str(port)]


@pytest.mark.timeout(120)
def test_ranks_of_two_machines_train_together(machines: tuple[Path, dict[str, str], list[str]]) -> None:
    folder, environment, command = machines
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [*command, "train.py", str(folder)],
        capture_output=True, text=True, timeout=100, cwd=folder, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted((folder / "seen").read_text().split()) == ["machine-a", "machine-b"]
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]
    assert found[0][0] == found[1][0] == found[2][0]
    assert [(size, local) for _, size, local, *_ in found] == [(3, "1"), (3, "2"), (3, "2")]
    assert [number for *_, number, _, _ in found] == ["--local_rank=0", "--local_rank=0", "--local_rank=1"]
    assert {(place, extra) for *_, place, extra in found} == {(str(folder), "went along")}


@pytest.mark.timeout(120)
def test_when_one_machine_fails_the_others_are_ended(machines: tuple[Path, dict[str, str], list[str]]) -> None:
    folder, environment, command = machines
    (folder / "fails.py").write_text(
        "import os, time\nif os.environ['RANK'] == '2':\n    raise SystemExit(7)\ntime.sleep(600)\n"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [*command, "fails.py"], capture_output=True, text=True, timeout=100, cwd=folder, env=environment, check=False
    )
    assert done.returncode == 7
    assert "shoal: machine-b failed first, with exit code 7; the other machines were ended." in done.stderr
    assert "rank 2 failed first: it ended with exit code 7" in done.stderr
    assert time.monotonic() - begin < 60


NASTY = ["two words", "; touch canary", "$(touch canary)", "`touch canary`", "it's $HOME", "a\nb", "-oX", "", "*"]


@pytest.mark.timeout(120)
def test_arguments_and_variables_reach_each_machine_as_they_are(
    machines: tuple[Path, dict[str, str], list[str]],
) -> None:
    folder, environment, command = machines
    (folder / "says.py").write_text(
        "import json, os, sys\nwith open(os.environ['RANK'], 'w') as file:\n"
        "    json.dump([sys.argv[1:], os.environ['GLOO_EXTRA']], file)\n"
    )
    environment |= {"GLOO_EXTRA": "; touch canary $(touch canary) 'a\nb"}
    words = [*command, "--no_local_rank", "says.py", *NASTY]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        assert json.loads((folder / str(rank)).read_text()) == [NASTY, environment["GLOO_EXTRA"]]
    assert not (folder / "canary").exists()


@pytest.mark.parametrize("name", ["-oProxyCommand=touch${IFS}canary", "$(touch${IFS}canary)", "a;touch${IFS}canary"])
def test_a_hostfile_names_no_option_of_ssh_and_no_command(
    name: str, machines: tuple[Path, dict[str, str], list[str]]
) -> None:
    folder, environment, command = machines
    (folder / "hosts").write_text(f"machine-a slots=1\n{name} slots=1\n")
    done = subprocess.run(
        [*command, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "hosts, line 2: " in done.stderr, done.stderr
    assert not (folder / "seen").exists() and not (folder / "canary").exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_ends_all_machines(
    machines: tuple[Path, dict[str, str], list[str]], number: signal.Signals
) -> None:
    folder, environment, command = machines
    (folder / "waits.py").write_text(WAITS)
    process = subprocess.Popen(
        [*command, "waits.py", str(folder)], cwd=folder, env=environment, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    files = [folder / f"pid{rank}" for rank in range(3)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(60) == (128 + number if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 30
    for file in files:
        while is_alive(int(file.read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # nobody may be there to reap it
