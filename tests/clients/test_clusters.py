"""What ``shoal run --print`` prints, given to the clusters' own libraries: Kubeflow's models, SkyPilot, Ray Train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.launch import ClusterJob, Program
from shoal.launch.clusters import Target, render

PROGRAM = Program(
    "train.py", ["a b", "$X"], is_module=False, options=[], num_nodes=2, ranks_per_node=8, stop_seconds=None, python="x"
)
JOBS = [
    ClusterJob(image="registry/train:1"),
    ClusterJob(image="registry/train:1", minutes=5, cpus=3, memory=4, namespace="team", gpus=0, name="llm"),
]
TRAIN = """
import json, os, sys
import helper
import torch, shoal
torch.manual_seed(0)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
engine, *_ = shoal.initialize(model=torch.nn.Linear(4, 2), config=config)
engine.backward(engine(torch.full((2, 4), float(engine.global_rank + 1))).sum()); engine.step()
weight = engine.module.weight.detach().tolist()
with open(f"{engine.global_rank}.json", "w") as file:
    json.dump([engine.world_size, engine.local_rank, weight, sys.argv[1:], os.environ["A"], __name__], file)
engine.destroy()
"""


def manifest(target: Target, job: ClusterJob, variables: Mapping[str, str]) -> Any:
    return yaml.safe_load(render(target, job, PROGRAM, variables))


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(
    ("target", "model"),
    [(Target.trainjob, "TrainerV1alpha1TrainJob"), (Target.jobset, "JobsetV1alpha2JobSet")],
)
def test_a_manifest_has_the_fields_and_types_of_the_api(target: Target, model: str, job: ClusterJob) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    made = manifest(target, job, {"A": "b"})
    of_api = getattr(models, model)
    assert of_api.from_dict(made).to_dict() == made  # a field that the API does not have would be lost
    section = made["spec"]["trainer"] if target is Target.trainjob else made["spec"]["replicatedJobs"][0]
    name = "numNodes" if target is Target.trainjob else "replicas"
    section[name] = str(section[name])
    with pytest.raises(ValueError, match=name):
        of_api.from_dict(made)


@pytest.mark.parametrize(
    ("job", "accelerators"),
    [(ClusterJob(accelerator="H100"), {"H100": 8}), (ClusterJob(gpus=0, cpus=4, memory=5, image="a/b:1"), None)],
)
def test_skypilot_reads_its_task(job: ClusterJob, accelerators: dict[str, int] | None) -> None:
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml_config(manifest(Target.sky, job, {"A": "b"}))
    (resources,) = task.resources
    assert (task.num_nodes, task.envs["A"], resources.accelerators) == (2, "b", accelerators)


@pytest.mark.timeout(400)  # Ray's own processes start here
def test_ray_trains_with_the_script_that_is_printed(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "helper.py").write_text("")
    program = replace(PROGRAM, num_nodes=1, ranks_per_node=2, arguments=["a b", '$HOME "q"'])
    job = ClusterJob(gpus=0, max_restarts=0)
    (tmp_path / "train_ray.py").write_text(render(Target.ray, job, program, {"A": "x 'y' $Z"}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "train_ray.py"], cwd=tmp_path, env=environment, check=True, timeout=380)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (first[:2], second[:2]) == ([2, 0], [2, 1])
    assert first[2] == second[2]
    assert first[3:] == second[3:] == [["a b", '$HOME "q"'], "x 'y' $Z", "__main__"]
