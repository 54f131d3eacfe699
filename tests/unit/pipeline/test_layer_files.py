"""PipelineModule's layer files: read at another number of stages, and those that DeepSpeed wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.errors import UsageError
from shoal.pipeline.layers import LayerSpec, TiedLayerSpec
from shoal.pipeline.module import PipelineModule
from tests.fixtures.deepspeed.pipeline_model import pipeline_layers
from tests.helpers.places import FIXTURES

MADE = FIXTURES / "deepspeed"


def stages(count: int, *, tied: bool, seed: int = 0) -> list[PipelineModule]:
    made = []
    for rank in range(count):
        torch.manual_seed(seed)
        layers = pipeline_layers(LayerSpec, TiedLayerSpec, tied=tied)
        made.append(PipelineModule(layers, count, partition_method="uniform", pipeline_rank=rank))
    return made


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (3, 1), (1, 2)])
def test_layer_files_load_at_another_number_of_stages(saved: int, loaded: int, tied: bool, tmp_path: Path) -> None:
    source = stages(saved, tied=tied, seed=1)
    for part in source:
        part.save_state_dict(str(tmp_path), torch)
    expected = {name: value for part in source for name, value in part.state_dict().items()}
    for part in stages(loaded, tied=tied):
        part.load_state_dir(str(tmp_path), torch)
        for name, value in part.state_dict().items():
            assert torch.equal(value, expected[name]), name
    (tmp_path / "layer_01-model_states.pt").unlink()
    with pytest.raises(UsageError, match=r"layer_01-model_states.pt of layer 1 is not there"):
        stages(1, tied=tied)[0].load_state_dir(str(tmp_path), torch)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("case", ["pp2-stage0", "pp2-tied-stage0"])
def test_files_of_deepspeed_load_and_are_written_under_its_names(case: str, count: int, tmp_path: Path) -> None:
    folder = MADE / case / "checkpoint" / "global_step3"
    parts = stages(count, tied="tied" in case)
    for part in parts:
        part.load_state_dir(str(folder), torch)
        part.save_state_dict(str(tmp_path), torch)
    for path in folder.glob("layer_*"):
        theirs, ours = torch.load(path), torch.load(tmp_path / path.name)
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(value, ours[name]) for name, value in theirs.items())


def test_names_and_what_the_engine_does_itself() -> None:
    part = stages(2, tied=True)[1]
    assert part.ckpt_prefix("dir", "tag") == "dir/tag/module-pipe_01"
    folder = MADE / "pp2-stage0" / "checkpoint" / "global_step3"
    path = part.ckpt_layer_path(str(folder), 1)
    assert part.ckpt_layer_path_list(str(folder), 1) == [path]
    with pytest.raises(UsageError, match="engine already adds up"):
        part.allreduce_tied_weight_gradients()
    with pytest.raises(UsageError, match="own communicators"):
        part.get_tied_weights_and_groups()
    part.has_engine = True
    with pytest.raises(UsageError, match="after initialize"):
        part.load_state_dir(str(folder), torch)
