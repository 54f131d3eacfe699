"""The `deepspeed` command's flags: which ranks, on which devices, and what is run."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

import pytest

from shoal.compat import launching
from shoal.compat.environment import exported
from shoal.compat.launching import parse_hostfile, parse_inclusion_exclusion, parse_resource_filter
from shoal.errors import ConfigError, NotBuiltError
from shoal.launch import (
    BoundCores,
    Elastic,
    LocalJob,
    Outcome,
    Place,
    RemoteJob,
    cpu_list,
    divide_cores,
    physical_cores,
)

PYTHON = (sys.executable, "-u", "-m", "shoal.compat.deepspeed")


def job(*args: str) -> LocalJob:
    found = launching.job_of(launching.parse_args(args))
    assert isinstance(found, LocalJob)
    return found


def jobs(*args: str) -> RemoteJob:
    found = launching.job_of(launching.parse_args(args))
    assert isinstance(found, RemoteJob)
    return found


@pytest.fixture
def two_machines(tmp_path: Path) -> list[str]:
    (tmp_path / "hosts").write_text("worker-0 slots=2\nworker-1 slots=4\n")
    return ["--hostfile", str(tmp_path / "hosts")]


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)


@pytest.mark.usefixtures("no_devices")
def test_without_devices_there_are_as_many_ranks_as_asked_for_and_one_by_default() -> None:
    assert job("a.py").num_ranks == 1
    assert job("--num_gpus", "2", "a.py").num_ranks == 2
    assert job("--num_accelerators", "3", "a.py").num_ranks == 3
    assert job("--include", "localhost:0,1", "a.py").num_ranks == 2


@pytest.mark.usefixtures("no_devices")
def test_the_script_gets_its_own_arguments_after_the_local_rank() -> None:
    given = ["--num_gpus", "1", "a.py", "--deepspeed", "--deepspeed_config", "ds.json", "--num_gpus", "9"]
    assert job(*given).program == [*PYTHON, "--local-rank", *given[2:]]
    assert job("--no_local_rank", "a.py", "-x").program == [*PYTHON, "a.py", "-x"]
    assert job("--module", "--no_local_rank", "my.train").program == [*PYTHON, "-m", "my.train"]
    assert job("--no_python", "./train.sh", "5").program == ["./train.sh", "5"]


@pytest.mark.usefixtures("no_devices")
def test_the_ranks_have_the_alias_and_listen_at_the_given_address() -> None:
    assert job("a.py").environment["SHOAL_AS_DEEPSPEED"] == "1"
    assert "MASTER_PORT" not in job("a.py").environment
    told = job("--master_port", "29511", "a.py").environment
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("127.0.0.1", "29511")


@pytest.mark.usefixtures("four_devices")
def test_with_devices_there_is_a_rank_for_each_of_those_left() -> None:
    assert job("a.py").num_ranks == 4 and "CUDA_VISIBLE_DEVICES" not in job("a.py").environment
    some = job("--include", "localhost:1,3", "a.py")
    assert (some.num_ranks, some.environment["CUDA_VISIBLE_DEVICES"]) == (2, "1,3")
    others = job("--exclude", "localhost:0", "a.py")
    assert (others.num_ranks, others.environment["CUDA_VISIBLE_DEVICES"]) == (3, "1,2,3")
    assert job("--num_gpus", "3", "a.py").num_ranks == 3
    with pytest.raises(ConfigError, match=r"--num_gpus 5, but there are 4 devices: 0, 1, 2, 3"):
        job("--num_gpus", "5", "a.py")


@pytest.mark.usefixtures("four_devices")
def test_visible_devices_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert job("a.py").num_ranks == 2
    one = job("--include", "localhost:3", "a.py")
    assert (one.num_ranks, one.environment["CUDA_VISIBLE_DEVICES"]) == (1, "3")
    with pytest.raises(ConfigError, match="No slot '0' specified on host 'localhost'"):
        job("--include", "localhost:0", "a.py")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5f0c,GPU-9a1e")
    assert job("--num_gpus", "1", "a.py").num_ranks == 1


@pytest.mark.usefixtures("no_devices")
def test_a_hostfile_of_this_machine_alone_counts_its_slots(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"# mine\n{socket.gethostname()} slots=2\n")
    assert job("--hostfile", str(hosts), "a.py").num_ranks == 2
    with pytest.raises(ConfigError, match="there is no such file"):
        job("--hostfile", str(tmp_path / "none"), "a.py")


@pytest.mark.usefixtures("no_devices")
@pytest.mark.parametrize(
    "flags",
    [
        ["--force_multi"],
        ["--venv_script", "x"],
        ["--enable_each_rank_log", "logs"],
    ],
    ids=lambda flags: flags[0],
)
def test_flags_of_what_is_not_there_are_refused_by_name(flags: list[str]) -> None:
    with pytest.raises(NotBuiltError, match=flags[0]):
        job(*flags, "a.py")


@pytest.mark.usefixtures("no_devices")
def test_autotuning_runs_the_same_command_with_other_arguments_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, scripts = [], []
    monkeypatch.setattr(launching, "run_local", lambda job: jobs.append(job) or Outcome(0))
    monkeypatch.setattr(launching, "autotune", lambda script, mode, say: scripts.append((script, mode)) or Outcome(3))
    monkeypatch.setattr(launching, "check_script", lambda *args, **options: None)
    with pytest.raises(SystemExit, match="3"):
        launching.main(["--num_gpus", "3", "--autotuning", "run", "a.py", "--deepspeed", "ds.json"])
    ((script, mode),) = scripts
    assert mode == "run" and not jobs
    assert script.command == ("shoal", "deepspeed", "--num_gpus", "3", "a.py")
    assert script.arguments == ("--deepspeed", "ds.json") and script.num_ranks == 3
    script.start(("--deepspeed", "other.json"))
    assert jobs[0].num_ranks == 3 and jobs[0].program[-3:] == ["a.py", "--deepspeed", "other.json"]
    with pytest.raises(NotBuiltError, match="on several machines"):
        launching.main(["--elastic_training", "--autotuning=tune", "a.py", "--deepspeed", "ds.json"])
    with pytest.raises(SystemExit):
        launching.parse_args(["--autotuning", "try", "a.py"])


@pytest.mark.usefixtures("no_devices")
def test_slurms_srun_starts_the_ranks_of_all_machines(
    tmp_path: Path, two_machines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = ["--launcher", "slurm"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no program srun"):
        jobs(*slurm, "--num_nodes", "2", "--num_gpus", "4", "a.py")
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    found = jobs(*slurm, "--num_nodes", "2", "--num_gpus", "4", "--launcher_args", "--mem 0", "a.py", "-x")
    assert found.commands == {
        "srun": [
            *("srun", "--nodes", "2", "--ntasks", "8", "--ntasks-per-node", "4", "--export=ALL", "--mem", "0"),
            *PYTHON,
            *("a.py", "-x"),
        ]
    }
    assert found.here == {"srun"}
    assert found.environment["SHOAL_AS_DEEPSPEED"] == "1"
    named = jobs(*slurm, *two_machines, "--num_gpus", "2", "--master_port", "29600", "a.py")
    assert named.commands["srun"][1:9] == [
        *("--nodes", "2", "--ntasks", "4", "--ntasks-per-node", "2", "--nodelist", "worker-0,worker-1"),
    ]
    assert named.environment["MASTER_PORT"] == "29600"
    for odd in (two_machines, [*two_machines, "--include", "worker-0:1@worker-1:1"]):
        with pytest.raises(ConfigError, match="srun cannot place ranks on these slots"):
            jobs(*slurm, *odd, "a.py")


def test_ranks_are_bound_to_cores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    for cpu in range(8):
        (tmp_path / str(cpu)).write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    topology = str(tmp_path / "{}")
    assert physical_cores(topology=topology) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert physical_cores([0, 1, 5], topology) == [[0], [1, 5]]
    assert physical_cores([2, 3], str(tmp_path / "none{}")) == [[2], [3]]
    assert divide_cores(physical_cores(topology=topology), 3) == BoundCores([[0, 4], [1, 5], [2, 6]], 1)
    with pytest.raises(ConfigError, match="5 ranks, each with cores of its own, and 4 cores"):
        divide_cores(physical_cores(topology=topology), 5)
    with pytest.raises(ConfigError, match="CPUs 8 do not exist"):
        physical_cores([7, 8])
    with pytest.raises(ConfigError, match="'0-,x' is not a list"):
        cpu_list("0-,x")


@pytest.mark.usefixtures("no_devices")
def test_elastic_training_starts_the_ranks_anew() -> None:
    assert job("--num_gpus", "2", "a.py").elastic is None
    alone = job("--num_gpus", "2", "--elastic_training", "--master_port", "29512", "a.py")
    assert alone.elastic == Elastic(min_nodes=1, max_restarts=100) and alone.place is None
    assert "MASTER_PORT" not in alone.environment  # a new one each time
    flags = ["--no_ssh", "--node_rank", "1", "--num_nodes", "4", "--num_gpus", "2", "--master_addr", "worker-0"]
    part = job(*flags, "--elastic_training", "--min_elastic_nodes", "2", "--max_elastic_nodes", "3", "a.py")
    assert part.elastic == Elastic(min_nodes=2)
    assert part.place == Place(node_rank=1, num_nodes=3, address="worker-0", port=29500)


@pytest.mark.usefixtures("no_devices")
def test_elastic_training_that_cannot_be_is_refused(two_machines: list[str]) -> None:
    with pytest.raises(ConfigError, match="--min_elastic_nodes 2 --max_elastic_nodes 3 without --elastic_training"):
        job("--min_elastic_nodes", "2", "--max_elastic_nodes", "3", "a.py")
    with pytest.raises(ConfigError, match="on 1 to 2 of 1 machines"):
        job("--elastic_training", "--max_elastic_nodes", "2", "a.py")
    for low, high in (("0", "2"), ("3", "2"), ("1", "3")):
        with pytest.raises(ConfigError, match=f"on {low} to {high} of 2 machines") as caught:
            job(*two_machines, "--no_ssh", "--node_rank", "0", "--elastic_training", "--min_elastic_nodes", low,
                "--max_elastic_nodes", high, "a.py")  # fmt: skip
        assert caught.value.code == "launch-elastic"
    with pytest.raises(NotBuiltError, match="--elastic_training by ssh"):
        jobs(*two_machines, "--elastic_training", "a.py")


@pytest.mark.usefixtures("no_devices")
def test_each_machine_of_the_hostfile_gets_a_command_of_its_own(two_machines: list[str]) -> None:
    made = jobs(*two_machines, "--ssh_port", "2222", "--launcher_args=-4 -v", "--module", "my.train", "--deepspeed")
    assert list(made.commands) == ["worker-0", "worker-1"]
    assert made.here == frozenset()
    assert list(made.ssh_options) == ["-p", "2222", "-4", "-v"]
    for number, command in enumerate(made.commands.values()):
        assert list(command[:6]) == [sys.executable, "-u", "-m", "shoal", "deepspeed", "--no_ssh"]
        part = job(*command[5:])
        assert part.num_ranks == (2, 4)[number]
        assert part.place == Place(number, 2, "worker-0", 29500)
        assert part.program == [*PYTHON, "--local-rank", "-m", "my.train", "--deepspeed"]
        assert part.environment["SHOAL_AS_DEEPSPEED"] == "1"


@pytest.mark.usefixtures("no_devices")
def test_machines_and_slots_are_chosen(two_machines: list[str]) -> None:
    def ranks(*flags: str) -> dict[str, int]:
        commands = jobs(*two_machines, *flags, "a.py").commands
        return {host: job(*command[5:]).num_ranks for host, command in commands.items()}

    assert ranks("--num_gpus", "1") == {"worker-0": 1, "worker-1": 1}
    assert ranks("--num_nodes", "1") == {"worker-0": 2}
    assert ranks("--exclude", "worker-0:1@worker-1:0,3") == {"worker-0": 1, "worker-1": 2}
    assert ranks("--include", "worker-1:2") == {"worker-1": 1}
    # The same command on each machine.
    common = ["--no_ssh", "--num_nodes", "3", "--num_gpus", "8", "--master_addr", "10.0.0.1", "--master_port", "4000"]
    assert job(*common, "--node_rank", "2", "a.py").place == Place(2, 3, "10.0.0.1", 4000)
    assert job(*common, "--node_rank", "2", "a.py").num_ranks == 8


@pytest.mark.usefixtures("four_devices")
def test_a_machine_of_several_takes_the_devices_of_its_slots(two_machines: list[str]) -> None:
    def part(*flags: str) -> LocalJob:
        return job(*two_machines, *flags, "--no_ssh", "--node_rank", "1", "a.py")

    assert "CUDA_VISIBLE_DEVICES" not in part().environment
    assert part("-i", "worker-0@worker-1:1,3").environment["CUDA_VISIBLE_DEVICES"] == "1,3"


@pytest.mark.usefixtures("no_devices")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_nodes", "3"], "--num_nodes 3, but there are 2 machines: worker-0, worker-1"),
        (["--num_gpus", "3"], "--num_gpus 3, but worker-0 has 2 slots"),
        (["--no_ssh", "--node_rank", "2"], "--node_rank 2 of 2 machines"),
        (["--no_ssh"], "--node_rank -1 of 2 machines"),
        (["--node_rank", "0"], "--node_rank 0 without --no_ssh"),
    ],
)
def test_machines_that_are_not_there_are_an_error(two_machines: list[str], flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launching.job_of(launching.parse_args([*two_machines, *flags, "a.py"]))


@pytest.mark.usefixtures("no_devices")
def test_a_first_machine_that_the_others_cannot_reach_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\nworker-1 slots=1\n")
    flags = ["--hostfile", str(tmp_path / "hosts")]
    with pytest.raises(ConfigError, match="cannot reach the first one by the name 'localhost'"):
        jobs(*flags, "a.py")
    assert jobs(*flags, "--master_addr", "10.0.0.7", "a.py").here == {"localhost"}
    with pytest.raises(ConfigError, match="no hostfile says which machines"):
        jobs("--num_nodes", "2", "a.py")


@pytest.mark.usefixtures("no_devices")
def test_other_launchers_than_ssh_are_named(two_machines: list[str]) -> None:
    with pytest.raises(NotBuiltError, match=r"--launcher openmpi(.|\n)*mpirun"):
        jobs(*two_machines, "--launcher", "openmpi", "a.py")


def test_variables_go_along_by_their_beginnings_and_by_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("PRIVATE", "1")
    monkeypatch.setenv("DS_ENV_FILE", ".vars")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".vars").write_text("# mine\nA=1\nNCCL_DEBUG=INFO\n")
    (tmp_path / ".vars").write_text("A=b=2\n")
    found = exported([tmp_path / "home", tmp_path])
    assert (found["A"], found["NCCL_DEBUG"]) == ("b=2", "INFO")
    assert "PRIVATE" not in found
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "home" / ".vars"))
    assert exported([tmp_path])["A"] == "1"
    (tmp_path / ".wrong").write_text("A=1\nexport B\n")
    monkeypatch.setenv("DS_ENV_FILE", ".wrong")
    with pytest.raises(ConfigError, match=r"line 2: 'export B' is not NAME=VALUE"):
        exported([tmp_path])


@pytest.mark.parametrize(
    "flags", ["--num_nodes 1 -i localhost", "--num_gpus 1 -e localhost", "-i localhost -e localhost"]
)
def test_a_count_beside_a_filter_is_an_error(flags: str) -> None:
    with pytest.raises(ConfigError, match=r"\[launch-filter\]"):
        job(*flags.split(), "a.py")


def test_filters_name_machines_and_slots() -> None:
    hosts = {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}
    assert parse_resource_filter(hosts) == hosts
    assert parse_resource_filter(hosts, include_str="b:0,3") == {"b": [0, 3]}
    assert parse_resource_filter(hosts, include_str="a:1@a:0,1") == {"a": [0, 1]}
    assert parse_resource_filter(hosts, exclude_str="a:0,1@b:3") == {"a": [2, 3], "b": [0, 1, 2]}
    assert parse_resource_filter(hosts, exclude_str="a@b") == {}
    assert parse_inclusion_exclusion({"a": 2, "b": 3}, "a@b:0,2", "") == {"a": [0, 1], "b": [0, 2]}
    for wrong in ("c", "a:4", "b@a:1@5"):
        with pytest.raises(ValueError):
            parse_resource_filter(hosts, exclude_str=wrong)


def test_a_hostfile_is_checked_line_by_line() -> None:
    assert parse_hostfile(["worker-1 slots=2", "", "  10.0.0.3 slots=4 # new"]) == {"worker-1": 2, "10.0.0.3": 4}
    for wrong, message in {
        "a slots=1\na slots=2": "line 2: 'a' is there twice",
        "this is bad slots=1": "line 1: 'this is bad slots=1' is not NAME slots=N",
        "": "names no machine",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse_hostfile(wrong.splitlines())


def test_the_options_have_deepspeeds_names_and_defaults() -> None:
    options = launching.parse_args(["a.py", "-b"])
    assert isinstance(options, argparse.Namespace)
    assert (options.hostfile, options.num_gpus, options.num_nodes, options.user_args) == (
        "/job/hostfile",
        -1,
        -1,
        ["-b"],
    )
