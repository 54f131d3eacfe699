"""What a cluster is given to run a script: a template (``templates/``) in which ``<<name>>`` is a value.

    ClusterJob, Program --values--> sbatch script | TrainJob | JobSet | Ray Train script | SkyPilot task

On each node of a cluster ``shoal run`` starts the ranks, as on one machine; only Ray starts ranks itself. A manifest is
filled after it is parsed, and a script with words that are quoted, so no argument can become code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from shoal.comm.environment import QUORUM_TOKEN
from shoal.errors import UsageError
from shoal.launch.failure import HARDWARE_EXIT_CODE
from shoal.launch.local import DEFAULT_PORT

Target = StrEnum("Target", "slurm trainjob jobset ray sky")
OnHardwareError = StrEnum("OnHardwareError", "exclude drain")
_FOLDER = Path(__file__).with_name("templates")
_PLACE = re.compile(r"<<([a-z_]+)>>")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # a Kubernetes label, short enough for the names of its pods
_WORD = re.compile(r"[\w.,:=/%@+\[\]-]+", re.ASCII)  # no space, quote or end of line: it is a part of an #SBATCH line
_RESTARTS = 3
_SAVE_SECONDS = 120
_END_SECONDS = 30  # for the end of the ranks and what comes after it
# What finds programs and libraries on a node of the same file system, and the token, whose value is not to be in the
# script. Other variables are passed on by their values.
_OF_THE_MACHINE = (
    "HOME,USER,LOGNAME,LANG,PATH,LD_LIBRARY_PATH,PYTHONPATH,VIRTUAL_ENV,CONDA_PREFIX,MODULEPATH," + QUORUM_TOKEN
)


def _option(help: str, targets: str = " ".join(Target), **limits: Any) -> Any:
    """A field, which is an option of ``shoal run`` for the targets named."""
    return field(default=None, metadata={"help": help, "targets": targets.split(), "limits": limits})


@dataclass(frozen=True)
class ClusterJob:
    """What is asked of a cluster; None: not given."""

    name: str | None = _option("Name of the job. Default: the script's.")
    gpus: int | None = _option("GPUs of each node; 0: none. Default: one for each rank.", min=0)
    cpus: int | None = _option("CPU cores of each node.", min=1)
    memory: int | None = _option("Host memory of each node, GiB.", min=1)
    max_restarts: int | None = _option("Largest number of restarts. Default: 3.", "slurm jobset ray sky", min=0)
    env: tuple[str, ...] | None = _option("NAME or NAME=VALUE: a variable for the ranks; may be given several times.")
    minutes: int | None = _option("Time limit.", "slurm trainjob jobset", min=1)
    image: str | None = _option("Container image with Shoal and the script.", "trainjob jobset sky")
    partition: str | None = _option("Partition.", "slurm")
    account: str | None = _option("Account.", "slurm")
    array: str | None = _option("Job array: one job for each number, such as 0-3 or 0-9%2.", "slurm")
    exclude: str | None = _option("Nodes not to use, such as gpu[03,07].", "slurm")
    on_hardware_error: OnHardwareError | None = _option(  # noqa: RUF009  (an enum does not change)
        "exclude: start again without the node (default); drain: also give it to no other job, as an operator may.",
        "slurm",
    )
    sbatch: tuple[str, ...] | None = _option("Another option of sbatch, such as qos=high; several times.", "slurm")
    namespace: str | None = _option("Namespace.", "trainjob jobset")
    runtime: str | None = _option("ClusterTrainingRuntime. Default: torch-distributed.", "trainjob")
    accelerator: str | None = _option("SkyPilot's name of the GPU, such as H100.", "sky")


@dataclass(frozen=True)
class Program:
    """The script, and how ``shoal run`` starts its ranks.

    Args:
        options: of ``shoal run`` on each node, without those of the place among the nodes.
        stop_seconds: in which ranks may save when they are asked to end; None: 120.
        python: the interpreter; in a container it is ``python``.
        address: of the first node; None: its name.
    """

    script: str
    arguments: Sequence[str]
    is_module: bool
    options: Sequence[str]
    num_nodes: int
    ranks_per_node: int
    stop_seconds: int | None
    python: str
    address: str | None = None
    port: int | None = None


def render(target: Target, job: ClusterJob, program: Program, variables: Mapping[str, str]) -> str:
    """The text that starts the job.

    Args:
        variables: for the ranks.

    Raises: UsageError: an option that the target does not have, or lacks, or that is not of its form.
    """
    _check(target, job)
    values = _values(job, program)
    file, values_of = _TEMPLATES[target]
    values |= values_of(job, program, variables)
    template = (_FOLDER / file).read_text(encoding="utf-8")
    if not file.endswith(".yaml"):
        return _PLACE.sub(lambda match: str(values[match[1]]), template)
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes several lines as a block."""

    Dumper.add_representer(
        str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)
    )
    comment, _, _ = template.partition("\n")
    filled = _filled(yaml.safe_load(template), values)
    return f"{comment}\n{yaml.dump(filled, Dumper=Dumper, sort_keys=False, width=1000)}"


def job_name(job: ClusterJob, program: Program) -> str:
    """The job's name: the one given, or the script's, in letters that every cluster takes."""
    if job.name is not None:
        return job.name
    stem = program.script.rpartition(".")[2] if program.is_module else Path(program.script).stem
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).lstrip("-0123456789")[:40].rstrip("-") or "shoal"


def _check(target: Target, job: ClusterJob) -> None:
    for each in fields(job):
        value, targets = getattr(job, each.name), each.metadata["targets"]
        if value is not None and target not in targets:
            raise UsageError(
                f"--{each.name.replace('_', '-')} is for {' and '.join(targets)}; {target} has no such setting.",
                do="leave it out.",
                code="launch-cluster",
            )
    if target in ("trainjob", "jobset") and job.image is None:
        raise UsageError(
            f"{target} needs --image.", do="name an image with Shoal and the script.", code="launch-cluster"
        )
    if job.name is not None and not _NAME.fullmatch(job.name):
        raise UsageError(
            f"--name {job.name!r} is not a name that every cluster takes.",
            do="use up to 40 lower-case letters, digits and '-', with a letter first.",
            code="launch-cluster",
        )
    for name in ("partition", "account", "array", "exclude", "sbatch"):
        for word in _several(getattr(job, name)):
            if not _WORD.fullmatch(word):
                raise UsageError(
                    f"--{name} {word!r} has characters that an #SBATCH line cannot have.",
                    do="use letters, digits and . , : = / % @ + [ ] - _",
                    code="launch-cluster",
                )


def _several(value: str | tuple[str, ...] | None) -> Sequence[str]:
    return () if value is None else (value,) if isinstance(value, str) else value


def _values(job: ClusterJob, program: Program) -> dict[str, Any]:
    """What all targets have."""
    port = DEFAULT_PORT if program.port is None else program.port
    return {
        "name": job_name(job, program),
        "nodes": program.num_nodes,
        "nodes_text": str(program.num_nodes),
        "restarts": _RESTARTS if job.max_restarts is None else job.max_restarts,
        "seconds": None if job.minutes is None else 60 * job.minutes,
        "signal_seconds": _save_seconds(program) + _END_SECONDS,
        "port": port,
        "port_text": str(port),
        "run": shlex.join(_words(program)),
        "image": job.image,
    }


def _save_seconds(program: Program) -> int:
    return _SAVE_SECONDS if program.stop_seconds is None else program.stop_seconds


def _words(program: Program) -> list[str]:
    """The arguments of ``shoal run`` that are the same on every node."""
    script = [*(["--module"] if program.is_module else []), program.script, *program.arguments]
    numbers = ["--ranks", str(program.ranks_per_node), "--stop-seconds", str(_save_seconds(program))]
    return [*numbers, *program.options, *script]


def _gpus(job: ClusterJob, program: Program) -> int:
    return program.ranks_per_node if job.gpus is None else job.gpus


def _for_slurm(job: ClusterJob, program: Program, variables: Mapping[str, str]) -> dict[str, Any]:
    gpus = _gpus(job, program)
    settings = {
        "gpus-per-node": gpus or None,
        "cpus-per-task": job.cpus,
        "mem": None if job.memory is None else f"{job.memory}G",
        "time": job.minutes,
        "partition": job.partition,
        "account": job.account,
        "array": job.array,
        "exclude": job.exclude,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in settings.items() if value is not None]
    lines += [f"#SBATCH --{word.lstrip('-')}" for word in _several(job.sbatch)]
    return {
        "directives": "\n".join(lines),
        "exported": _OF_THE_MACHINE,
        "exports": "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()),
        "exclude": job.exclude or "",
        "python": shlex.quote(program.python),
        "address": shlex.quote(program.address or ""),
        "port": "" if program.port is None else program.port,
        "hardware": HARDWARE_EXIT_CODE,
        "on_hardware_error": job.on_hardware_error or OnHardwareError.exclude,
    }


def _for_kubernetes(job: ClusterJob, program: Program, variables: Mapping[str, str]) -> dict[str, Any]:
    def literal(text: str) -> str:
        return text.replace("$", "$$")  # Kubernetes replaces $(NAME) in arguments and variables

    resources = {
        "nvidia.com/gpu": _gpus(job, program) or None,
        "cpu": None if job.cpus is None else str(job.cpus),
        "memory": None if job.memory is None else f"{job.memory}Gi",
    }
    return {
        "namespace": job.namespace,
        "runtime": job.runtime or "torch-distributed",
        "resources": {name: value for name, value in resources.items() if value is not None} or None,
        "words": [literal(word) for word in _words(program)],
        "environment": [{"name": name, "value": literal(value)} for name, value in variables.items()] or None,
    }


def _for_sky(job: ClusterJob, program: Program, variables: Mapping[str, str]) -> dict[str, Any]:
    gpus = _gpus(job, program)
    if gpus and job.accelerator is None:
        raise UsageError(
            "sky needs --accelerator.", do="name the GPU, such as H100, or give --gpus 0.", code="launch-cluster"
        )
    return {
        "accelerators": f"{job.accelerator}:{gpus}" if gpus else None,
        "cpus": None if job.cpus is None else f"{job.cpus}+",
        "memory": None if job.memory is None else f"{job.memory}+",
        "image": None if job.image is None else f"docker:{job.image}",
        "environment": dict(variables) or None,
    }


def _for_ray(job: ClusterJob, program: Program, variables: Mapping[str, str]) -> dict[str, Any]:
    if program.options:
        raise UsageError(
            f"{' '.join(program.options)} is of shoal run, and Ray starts the ranks itself.",
            do="leave it out; `import deepspeed` imports Shoal after shoal.compat.finder.install() in the script.",
            code="launch-cluster",
        )
    ranks = program.ranks_per_node
    resources = {
        "CPU": None if job.cpus is None else job.cpus / ranks,
        "GPU": _gpus(job, program) / ranks or None,
        "memory": None if job.memory is None else job.memory * 2**30 // ranks,
    }
    return {
        "script": ascii(program.script),
        "arguments": ascii(list(program.arguments)),
        "runner": "run_module" if program.is_module else "run_path",
        "variables": ascii(dict(variables)),
        "num_ranks": program.num_nodes * ranks,
        "use_gpu": _gpus(job, program) > 0,
        "resources_of_a_rank": {name: value for name, value in resources.items() if value is not None} or None,
        "name_literal": ascii(job_name(job, program)),
    }


def _filled(node: Any, values: Mapping[str, Any]) -> Any:
    """The parsed template with its places filled; settings without a value, and sections that become empty, are left
    out.

    >>> _filled({"a": "<<x>>", "b": {"c": "<<y>>"}, "d": ["<<x>>-0"]}, {"x": "n: 1", "y": None})
    {'a': 'n: 1', 'd': ['n: 1-0']}
    """
    if isinstance(node, dict):
        filled = {name: _filled(value, values) for name, value in node.items()}
        return {name: value for name, value in filled.items() if value is not None} or None
    if isinstance(node, list):
        return [_filled(value, values) for value in node]
    if not isinstance(node, str):
        return node
    whole = _PLACE.fullmatch(node)
    return values[whole[1]] if whole else _PLACE.sub(lambda match: str(values[match[1]]), node)


_TEMPLATES: Mapping[Target, tuple[str, Callable[[ClusterJob, Program, Mapping[str, str]], dict[str, Any]]]] = {
    Target.slurm: ("slurm.sh.in", _for_slurm),
    Target.trainjob: ("trainjob.yaml", _for_kubernetes),
    Target.jobset: ("jobset.yaml", _for_kubernetes),
    Target.ray: ("ray.py.in", _for_ray),
    Target.sky: ("sky.yaml", _for_sky),
}
