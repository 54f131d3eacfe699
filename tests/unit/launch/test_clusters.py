"""What ``shoal run --print`` and ``--slurm`` make: each target's text, whose arguments arrive as they were given."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cli import main
from shoal.errors import UsageError
from shoal.launch import ClusterJob, Program
from shoal.launch.clusters import OnHardwareError, Target, job_name, render
from shoal.launch.environment import passed_on

NASTY = [
    "two words",
    "it's $HOME `id` $(id) $$ ${X}",
    '"; touch hacked; "',
    "line 1\n#SBATCH --exclude=all\nEOF",
    "key: [value, {a: b}] # no comment",
    "- *alias &anchor !tag %x @y",
    "<<name>> <<nodes>>",
    "",
    "-x",
    "é \\ \t",
    "yes",
    "08",
]
VARIABLES = {"A": "it's $(X) $Y\nB: c", "EMPTY": ""}
PROGRAM = Program(
    "train script.py", NASTY, is_module=False, options=[], num_nodes=2, ranks_per_node=4, stop_seconds=60, python="PY"
)
EXPECTED = ["--ranks", "4", "--stop-seconds", "60", "train script.py", *NASTY]
RECORDS = """#!PYTHON
import json, os, sys
with open(os.environ["RECORD"] + "." + os.environ.get("SLURM_NODEID", "0"), "w") as file:
    json.dump({"words": sys.argv[1:], "A": os.environ.get("A"), "EMPTY": os.environ.get("EMPTY")}, file)
sys.exit(int(os.environ.get("CODE", "0")) if os.environ.get("SLURM_NODEID", "1") == "1" else 0)
"""
# Starts two tasks here, and ends with the largest exit code, as srun does.
SRUN = """#!PYTHON
import os, signal, subprocess, sys, time
open(os.environ["RECORD"] + ".srun", "w").write(repr(sys.argv[1:]))
command = sys.argv[sys.argv.index("bash"):]
is_stopped = os.path.exists(os.environ["RECORD"] + ".runs")
tasks = []
for node in range(2):
    variables = {**os.environ, "SLURM_NODEID": str(node), "SLURMD_NODENAME": f"n{node}"}
    tasks.append(subprocess.Popen(command, env=variables))
code = max(task.wait() for task in tasks)
while os.path.exists(os.environ["RECORD"] + ".runs"):  # until scancel
    time.sleep(0.02)
sys.exit(143 if is_stopped else code)
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
"show hostnames") echo first; echo second ;;
"show job")
    echo "   JobState=${JOB_STATE:-RUNNING} Reason=None"
    echo "   PreemptEligibleTime=1 PreemptTime=${PREEMPTED:-None}" ;;
"update "*)
    echo "scontrol $*" >> "$RECORD.calls"
    if [ -n "$REFUSED" ]; then printf 'slurm_update error:\n%s\n' "$REFUSED" >&2; exit 1; fi ;;
*) echo "scontrol $*" >> "$RECORD.calls" ;;
esac
"""
OTHER = """#!/bin/bash
echo "$(basename "$0") $*" >> "$RECORD.calls"
rm -f "$RECORD.runs"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of Slurm, whose programs are stubs that record what they are called with."""
    programs = tmp_path / "bin"
    programs.mkdir()
    stubs = {"srun": SRUN, "scontrol": SCONTROL, "scancel": OTHER, "sbatch": OTHER, "PY": RECORDS, "python": RECORDS}
    for name, text in stubs.items():
        (programs / name).write_text(text.replace("PYTHON", sys.executable, 1))
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "RECORD": str(tmp_path / "record"),
        "SLURM_JOB_ID": "123",
        "SLURM_JOB_NODELIST": "n[0-1]",
    }


def run_batch(script: str, folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "job.sbatch").write_text(script)
    subprocess.run(["bash", "-n", "job.sbatch"], cwd=folder, check=True)
    return subprocess.run(
        ["bash", "job.sbatch"],
        cwd=folder,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def calls(folder: Path) -> list[str]:
    path = folder / "record.calls"
    return path.read_text().splitlines() if path.exists() else []


def seen(folder: Path, node: int) -> Any:
    return json.loads((folder / f"record.{node}").read_text())


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Kubernetes' replacement of $(NAME) in arguments and variables; $$ is a $."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else variables.get(m[1] or "", m[0]), text)


def test_each_node_of_a_slurm_job_gets_the_arguments_as_they_are(slurm: dict[str, str], tmp_path: Path) -> None:
    done = run_batch(render(Target.slurm, ClusterJob(gpus=0), PROGRAM, VARIABLES), tmp_path, slurm)
    assert (done.returncode, done.stderr) == (0, "")
    for node in (0, 1):
        place = ["--nodes", "2", "--master-addr", "first", "--master-port", "20123"]
        assert seen(tmp_path, node)["words"] == ["-m", "shoal", "run", "--node-rank", str(node), *place, *EXPECTED]
        assert (seen(tmp_path, node)["A"], seen(tmp_path, node)["EMPTY"]) == (VARIABLES["A"], "")
    assert calls(tmp_path) == []
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("array", [False, True])
def test_a_hardware_error_submits_the_job_anew_without_the_node(
    slurm: dict[str, str], tmp_path: Path, array: bool
) -> None:
    job = ClusterJob(name="llm", exclude="bad[1-2]", max_restarts=1)
    script = render(Target.slurm, job, PROGRAM, VARIABLES)
    slurm |= {"CODE": "74"} | ({"SLURM_ARRAY_JOB_ID": "120", "SLURM_ARRAY_TASK_ID": "3"} if array else {})
    for _ in range(2):  # the second time there have been as many restarts as are allowed
        done = run_batch(script, tmp_path, slurm)
        assert done.returncode == 74
        assert calls(tmp_path) == [f"sbatch --exclude=bad[1-2],n1 {'--array=3 ' if array else ''}job.sbatch"]
    assert (tmp_path / f"llm.failed-nodes{'.3' if array else ''}").read_text() == "n1\nn1\n"


@pytest.mark.parametrize("refused", ["", "Access/permission denied"])
def test_a_node_with_a_hardware_error_is_drained_where_slurm_lets_the_user(
    slurm: dict[str, str], tmp_path: Path, refused: str
) -> None:
    (tmp_path / "train-script.failed-nodes").write_text("n0\n")  # of an attempt before
    script = render(Target.slurm, ClusterJob(on_hardware_error=OnHardwareError.drain), PROGRAM, VARIABLES)
    done = run_batch(script, tmp_path, slurm | {"CODE": "74", "REFUSED": refused})
    drain, again = calls(tmp_path)
    assert drain == "scontrol update NodeName=n1 State=DRAIN Reason=hardware error in job 123"
    assert again == "sbatch --exclude=n0,n1 job.sbatch"
    told = f"not drained, but left out by this job: slurm_update error: {refused}" if refused else "drained"
    assert done.stdout.splitlines()[0] == f"hardware error: n1 is {told}"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["scancel --signal=TERM 123", "scontrol requeue 123"]),
        (
            {"SLURM_ARRAY_JOB_ID": "120", "SLURM_ARRAY_TASK_ID": "3"},
            ["scancel --signal=TERM 120_3", "scontrol requeue 120_3"],
        ),
        ({"SLURM_RESTART_COUNT": "3"}, ["scancel --signal=TERM 123"]),
        ({"JOB_STATE": "COMPLETING"}, ["scancel --signal=TERM 123"]),  # cancelled in the meantime
    ],
)
def test_the_signal_before_the_time_limit_ends_the_ranks_and_queues_the_job_again(
    slurm: dict[str, str], tmp_path: Path, environment: dict[str, str], expected: list[str]
) -> None:
    (tmp_path / "record.runs").touch()
    (tmp_path / "job.sbatch").write_text(render(Target.slurm, ClusterJob(), PROGRAM, {}))
    with subprocess.Popen(["bash", "job.sbatch"], cwd=tmp_path, env=slurm | environment) as batch:
        deadline = time.monotonic() + 30
        while not (tmp_path / "record.1").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        batch.send_signal(signal.SIGUSR1)
        assert batch.wait(30) == 143
    assert calls(tmp_path) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CODE": "143"}, []),  # a signal has ended the ranks
        ({"CODE": "1", "SLURM_RESTART_COUNT": "9"}, []),
        ({"CODE": "143", "SLURM_RESTART_COUNT": "9", "PREEMPTED": "2026-01-01T00:00:00"}, ["scontrol requeue 123"]),
        ({"CODE": "143", "JOB_STATE": "CANCELLED", "PREEMPTED": "2026-01-01T00:00:00"}, []),
    ],
)
def test_a_failed_job_stays_failed_and_a_preempted_one_is_queued_again(
    slurm: dict[str, str], tmp_path: Path, environment: dict[str, str], expected: list[str]
) -> None:
    done = run_batch(render(Target.slurm, ClusterJob(), PROGRAM, {}), tmp_path, slurm | environment)
    assert done.returncode == int(environment["CODE"])
    assert calls(tmp_path) == expected


def test_options_of_slurm_are_directives() -> None:
    job = ClusterJob(
        *(None, None, 32, 256), minutes=90, partition="gpu", account="a.b", array="0-9%2", exclude="n[1,3]",
        sbatch=("qos=high", "--mail-type=END"),
    )  # fmt: skip
    program = replace(PROGRAM, address="10.0.0.1", port=1234)
    text = render(Target.slurm, job, program, {})
    directives = re.findall(r"^#SBATCH --(.*)$", text.partition("\n\n")[0], flags=re.MULTILINE)
    assert directives[:4] == ["job-name=train-script", "nodes=2", "ntasks-per-node=1", "output=train-script-%j.out"]
    assert directives[4:7] == ["open-mode=append", "requeue", "signal=B:USR1@90"]
    assert directives[8:] == [
        "gpus-per-node=4", "cpus-per-task=32", "mem=256G", "time=90", "partition=gpu", "account=a.b", "array=0-9%2",
        "exclude=n[1,3]", "qos=high", "mail-type=END",
    ]  # fmt: skip
    assert "HF_TOKEN" not in directives[7] and directives[7].startswith("export=HOME,")
    assert "\naddress=10.0.0.1\n" in text and "\nport=1234\n" in text


def manifest(target: Target, job: ClusterJob, program: Program = PROGRAM) -> Any:
    return yaml.safe_load(render(target, job, program, VARIABLES))


def test_a_trainjob_references_a_runtime_and_takes_the_place_from_its_variables() -> None:
    job = ClusterJob(name="llm", image="registry/shoal:1", minutes=10, cpus=8, memory=64, namespace="team")
    made = manifest(Target.trainjob, job)
    trainer = made["spec"].pop("trainer")
    assert made == {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "llm", "namespace": "team"},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed",
            },
            "activeDeadlineSeconds": 600,
        },
    }  # fmt: skip
    assert (trainer["image"], trainer["numNodes"]) == ("registry/shoal:1", 2)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4, "cpu": "8", "memory": "64Gi"}}
    of_runtime = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "5"}
    words = [expanded(word, of_runtime | {"X": "?", "id": "?"}) for word in trainer["command"] + trainer["args"]]
    place = ["--nodes", "2", "--node-rank", "1", "--master-addr", "a", "--master-port", "5"]
    assert words == ["python", "-m", "shoal", "run", *place, *EXPECTED]
    assert {each["name"]: expanded(each["value"], {"X": "?"}) for each in trainer["env"]} == VARIABLES


def test_a_jobset_has_a_headless_service_and_its_first_pod_is_the_rendezvous() -> None:
    made = manifest(Target.jobset, ClusterJob(image="shoal:1", minutes=10, gpus=0, max_restarts=0))
    name = "train-script"
    assert (made["apiVersion"], made["kind"], made["metadata"]) == (
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        {"name": name},
    )
    assert made["spec"]["network"] == {
        "enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name,
    }  # fmt: skip
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 0}
    (job,) = made["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"], spec["backoffLimit"]) == (
        2,
        2,
        "Indexed",
        0,
    )
    assert spec["activeDeadlineSeconds"] == 600
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 90)
    (container,) = pod["containers"]
    assert "resources" not in container
    words = [expanded(word, {"JOB_COMPLETION_INDEX": "1"}) for word in container["command"] + container["args"]]
    place = ["--nodes", "2", "--node-rank", "1", "--master-addr", f"{name}-node-0-0.{name}", "--master-port", "29500"]
    assert words == ["python", "-m", "shoal", "run", *place, *EXPECTED]


def test_a_task_of_skypilot_takes_the_place_from_its_variables(slurm: dict[str, str], tmp_path: Path) -> None:
    made = manifest(Target.sky, ClusterJob(accelerator="H100", cpus=16, memory=64, image="shoal:1"))
    run = made.pop("run")
    assert made == {
        "name": "train-script",
        "num_nodes": 2,
        "workdir": ".",
        "resources": {
            "accelerators": "H100:4", "cpus": "16+", "memory": "64+", "image_id": "docker:shoal:1",
            "job_recovery": {"max_restarts_on_errors": 3},
        },
        "envs": VARIABLES,
    }  # fmt: skip
    of_sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    subprocess.run(["bash", "-c", run], cwd=tmp_path, env=slurm | of_sky, check=True, timeout=60)
    place = ["--nodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29500"]
    assert seen(tmp_path, 0)["words"] == ["-m", "shoal", "run", *place, *EXPECTED]
    assert "accelerators" not in manifest(Target.sky, ClusterJob(gpus=0))["resources"]


def test_a_script_for_ray_has_the_arguments_as_literals() -> None:
    text = render(Target.ray, ClusterJob(cpus=8, memory=8, max_restarts=5), PROGRAM, VARIABLES)
    tree = ast.parse(text)
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id != "FOLDER"
    }
    assert values == {"SCRIPT": "train script.py", "ARGUMENTS": NASTY}
    keywords = {
        each.arg: ast.literal_eval(each.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("ScalingConfig", "FailureConfig", "ray.init")
        for each in node.keywords
    }
    assert keywords == {
        "runtime_env": {"env_vars": VARIABLES}, "num_workers": 8, "use_gpu": True,
        "resources_per_worker": {"CPU": 2.0, "GPU": 1.0, "memory": 2 * 2**30}, "max_failures": 5,
    }  # fmt: skip
    module = replace(PROGRAM, script="my.package.train", is_module=True)
    assert "runpy.run_module(SCRIPT" in render(Target.ray, ClusterJob(), module, {})


@pytest.mark.parametrize(
    ("target", "job", "message"),
    [
        (Target.ray, ClusterJob(partition="gpu"), "--partition is for slurm; ray has no such setting"),
        (Target.ray, ClusterJob(minutes=5), "--minutes is for slurm and trainjob and jobset; ray has no such setting"),
        (Target.trainjob, ClusterJob(image="x", max_restarts=1), "trainjob has no such setting"),
        (Target.slurm, ClusterJob(image="x"), "--image is for trainjob and jobset and sky; slurm has no such setting"),
        (Target.jobset, ClusterJob(), "jobset needs --image"),
        (Target.sky, ClusterJob(), "sky needs --accelerator"),
        (Target.slurm, ClusterJob(partition="a b"), "--partition 'a b' has characters"),
        (Target.slurm, ClusterJob(sbatch=("qos=x\n#SBATCH --uid=0",)), "has characters that an #SBATCH line"),
        (Target.slurm, ClusterJob(exclude="$(id)"), "has characters that an #SBATCH line"),
        (Target.slurm, ClusterJob(name="My Job"), "--name 'My Job' is not a name"),
        (Target.jobset, ClusterJob(image="x", name="a\n"), "is not a name that every cluster takes"),
    ],
)
def test_what_a_target_cannot_do_is_an_error(target: Target, job: ClusterJob, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        render(target, job, PROGRAM, {})


def test_ray_starts_the_ranks_itself() -> None:
    with pytest.raises(UsageError, match="--as-deepspeed is of shoal run, and Ray starts the ranks itself"):
        render(Target.ray, ClusterJob(), replace(PROGRAM, options=["--as-deepspeed"]), {})


@pytest.mark.parametrize(
    ("script", "is_module", "name"),
    [
        ("My_Train 2.py", False, "my-train-2"),
        ("3d/3d.py", False, "d"),
        ("a.b.train", True, "train"),
        ("ü.py", False, "shoal"),
        (f"{'x' * 60}.py", False, "x" * 40),
    ],
)
def test_a_job_has_the_scripts_name(script: str, is_module: bool, name: str) -> None:
    assert job_name(ClusterJob(), replace(PROGRAM, script=script, is_module=is_module)) == name


def test_only_listed_and_named_variables_are_passed_on() -> None:
    here = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "secret", "PATH": "/bin", "OMP_NUM_THREADS": "4", "BASH_FUNC_x%%": "()"}
    assert passed_on([], here) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}
    assert passed_on(["HF_TOKEN", "A=b=c", "NCCL_DEBUG=WARN"], here) == {
        "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4", "HF_TOKEN": "secret", "A": "b=c",
    }  # fmt: skip
    for given, message in [
        ("NOT_SET", "it is not set here"), ("A;B=1", "no name of a variable"), ("é=1", "no name of a variable"),
        ("RANK=1", "the launcher sets it itself"), ("PET_NNODES=1", "the launcher sets it itself"),
    ]:  # fmt: skip
        with pytest.raises(UsageError, match=message):
            passed_on([given], here)


def command(
    words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["shoal", "run", *words])
    (tmp_path / "train.py").write_text("")
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), *capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "gpu", "train.py"], "--partition without a cluster."),
        (["--gpus", "0", "--env", "A=1", "train.py"], "--gpus --env without a cluster."),
        (["--nodes", "2", "train.py"], "--nodes 2 without --node-rank and --master-addr."),
        (["--nodes", "2", "--node-rank", "2", "--master-addr", "a", "train.py"], "--node-rank 2 of --nodes 2."),
        (["--print", "slurm", "train.py"], "a cluster's node has no GPUs to count here."),
        (["--print", "slurm", "--ranks", "2", "--node-rank", "0", "train.py"], "--node-rank are not for a cluster"),
        (["--print", "sky", "--slurm", "--ranks", "2", "train.py"], "--slurm and --print sky."),
        (["--print", "slurm", "--ranks", "2", "nowhere.py"], "there is no file 'nowhere.py'"),
        (["--slurm", "--ranks", "2", "train.py"], "there is no program sbatch here."),
        (["--print", "slurm", "--ranks", "2", "--env", "NOT_SET", "train.py"], "--env NOT_SET: it is not set here."),
    ],
)
def test_a_wrong_command_says_what_to_do(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("NOT_SET", raising=False)
    code, _, shown = command(words, tmp_path, monkeypatch, capsys)
    assert code == 2
    assert (message in shown and "do: " in shown) or message.startswith("there is no file")


def test_slurm_gets_the_script_that_print_shows(
    slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    words = ["--nodes", "2", "--ranks", "4", "--partition", "gpu", "train.py", "--lr", "1 2"]
    code, shown, _ = command(["--print", "slurm", *words], tmp_path, monkeypatch, capsys)
    assert code == 0 and calls(tmp_path) == []
    assert "export NCCL_DEBUG=INFO\n" in shown and "--ranks 4 --stop-seconds 120 train.py --lr '1 2' <" in shown
    code, said, _ = command(["--slurm", *words], tmp_path, monkeypatch, capsys)
    assert (code, said) == (0, "wrote train.sbatch\n")
    assert (tmp_path / "train.sbatch").read_text() == shown
    assert calls(tmp_path) == ["sbatch train.sbatch"]


def test_the_commands_of_the_page_on_clusters_work(
    slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", slurm["PATH"])
    monkeypatch.setenv("RECORD", slurm["RECORD"])
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "clusters.md").read_text(encoding="utf-8")
    found = re.findall(r"^    shoal run ([^>\n]*(?:--print|--slurm)[^>\n]*)", page, flags=re.MULTILINE)
    assert len(found) == 7
    for line in found:
        code, shown, said = command(shlex.split(line), tmp_path, monkeypatch, capsys)
        assert (code, said) == (0, "") and shown
