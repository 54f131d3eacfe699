"""Experts that a folder has one by one, read as the stacked tensors of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.checkpoint.formats.huggingface import SafetensorsWeights, write_huggingface
from shoal.checkpoint.formats.model_weights import ExpertWeights
from shoal.checkpoint.manifest import MODEL
from tests.helpers.formats_source import MemorySource

NUM_EXPERTS, INNER, WIDTH = 3, 4, 5
STACKED = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]


def folder_of(path: Path, prefix: str, names: tuple[str, str, str], without: str = "") -> dict[str, torch.Tensor]:
    gate, up, down = names
    tensors = {f"{prefix}.gate.weight": torch.randn(NUM_EXPERTS, WIDTH)}
    for expert in range(NUM_EXPERTS):
        for name, shape in ((gate, (INNER, WIDTH)), (up, (INNER, WIDTH)), (down, (WIDTH, INNER))):
            tensors[f"{prefix}.experts.{expert}.{name}.weight"] = torch.randn(shape)
    tensors.pop(without, None)
    write_huggingface(MemorySource({MODEL: tensors}), path)
    return tensors


FAMILIES = {
    "mixtral": ("model.layers.0.block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("model.layers.0.mlp", ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_any_range_of_the_stacked_tensors_is_read_from_their_parts(tmp_path: Path, family: str) -> None:
    prefix, (gate, up, down) = FAMILIES[family]
    parts = folder_of(tmp_path, prefix, (gate, up, down))
    every = range(NUM_EXPERTS)
    stacked = {
        STACKED[0]: torch.stack(
            [torch.cat([parts[f"{prefix}.experts.{e}.{name}.weight"] for name in (gate, up)]) for e in every]
        ),
        STACKED[1]: torch.stack([parts[f"{prefix}.experts.{e}.{down}.weight"] for e in every]),
    }
    with SafetensorsWeights(tmp_path) as stored:
        weights = ExpertWeights(stored, STACKED)
        assert set(weights.tensors) == {*STACKED, "model.layers.0.mlp.gate.weight"}
        assert torch.equal(weights.read("model.layers.0.mlp.gate.weight"), parts[f"{prefix}.gate.weight"])
        for name, expected in stacked.items():
            assert weights.tensors[name].shape == expected.shape
            assert torch.equal(weights.read(name), expected)
            flat, numel = expected.view(-1), expected.numel()
            for begin, end in (
                (0, 0),
                (0, 1),
                (7, 20),
                (19, 21),
                (20, 60),
                (39, 40),
                (numel - 3, numel),
                (numel, numel),
            ):
                before = stored.num_bytes_read
                assert torch.equal(weights.read_range(name, begin, end), flat[begin:end])
                assert stored.num_bytes_read - before == 4 * (end - begin)


def test_a_model_with_a_list_of_experts_reads_them_one_by_one(tmp_path: Path) -> None:
    prefix, names = FAMILIES["mixtral"]
    parts = folder_of(tmp_path, prefix, names)
    with SafetensorsWeights(tmp_path) as stored:
        assert set(ExpertWeights(stored, list(parts)).tensors) == set(parts)


def test_experts_of_which_one_is_missing_are_left_as_they_are(tmp_path: Path) -> None:
    prefix, names = FAMILIES["qwen3_moe"]
    parts = folder_of(tmp_path, prefix, names, without=f"{prefix}.experts.1.up_proj.weight")
    with SafetensorsWeights(tmp_path) as stored:
        found = set(ExpertWeights(stored, STACKED).tensors)
    assert STACKED[0] not in found and STACKED[1] in found
    assert found - {STACKED[1]} == {name for name in parts if "down_proj" not in name}
