"""Hugging Face safetensors: read whole and by ranges, written in shards, and hostile headers and indexes refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.formats.huggingface import HuggingFaceSource, SafetensorsWeights, read_header, write_huggingface
from shoal.checkpoint.manifest import MODEL
from shoal.errors import CheckpointError
from tests.helpers.formats_source import MemorySource, are_equal, everything, trained

KEPT = everything(trained())[MODEL]


def in_bf16() -> dict[str, torch.Tensor]:
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in KEPT.items()}


def test_what_is_written_is_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    write_huggingface(trained(), tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    assert are_equal(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), in_bf16())
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}


def test_a_dtype_casts_what_is_of_floating_point(tmp_path: Path) -> None:
    write_huggingface(trained(), tmp_path / "a", dtype=torch.float32)
    assert are_equal(everything(HuggingFaceSource(tmp_path / "a"))[MODEL], KEPT)
    write_huggingface(trained(), tmp_path / "b", dtype=torch.float16)
    found = everything(HuggingFaceSource(tmp_path / "b"))[MODEL]
    assert torch.equal(found["layer.weight"], KEPT["layer.weight"].half())
    assert found["position"].dtype == torch.int64


def test_shards_have_an_index_and_come_back(tmp_path: Path) -> None:
    write_huggingface(trained(), tmp_path / "out", dtype=torch.float32, max_file_nbytes=112)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": (28 + 20 + 5 + 1) * 4 + 6 * 8}
    assert index["weight_map"]["embedding.weight"] == "model-00001-of-00003.safetensors"
    assert index["weight_map"]["position"] == "model-00003-of-00003.safetensors"
    source = HuggingFaceSource(tmp_path / "out")
    assert are_equal(everything(source)[MODEL], KEPT)
    assert source.about.aliases == {"embedding.weight": ("head.weight",)}
    assert "position" not in source.about.parameters
    assert source.about.notes == []


def test_what_the_library_writes_is_read_with_its_tied_weights(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    source = HuggingFaceSource(tmp_path)
    assert source.about.aliases == {"0.weight": ("1.weight",)}
    assert sorted(source.about.parameters) == ["0.bias", "0.weight", "1.bias", "2.bias", "2.weight"]
    assert torch.equal(source.read(MODEL, "0.weight"), model[0].weight)
    assert torch.equal(source.read(MODEL, "2.running_var"), torch.ones(3))


def test_dtypes_of_every_width_go_there_and_back(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.int16, torch.int8]
    dtypes += [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = {str(dtype): torch.arange(-3 if dtype.is_signed else 0, 4).to(dtype) for dtype in dtypes}
    tensors["bool"] = torch.tensor([True, False, True])
    write_huggingface(MemorySource({MODEL: tensors}), tmp_path / "out")
    found = everything(HuggingFaceSource(tmp_path / "out" / "model.safetensors"))[MODEL]
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))


@settings(max_examples=30)
@given(begin=st.integers(0, 20), length=st.integers(0, 20))
def test_a_range_is_that_of_the_flattened_tensor_and_only_its_bytes_are_read(begin: int, length: int) -> None:
    end = min(begin + length, 20)
    url = f"memory://ranges-{begin}-{length}/out"
    write_huggingface(trained(), url, dtype=torch.float32)
    with SafetensorsWeights(url) as weights:
        assert torch.equal(weights.read_range("layer.weight", begin, end), KEPT["layer.weight"].flatten()[begin:end])
        assert weights.num_bytes_read == 4 * (end - begin)
        with pytest.raises(IndexError):
            weights.read_range("layer.weight", 0, 21)


def test_a_target_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_huggingface(trained(), tmp_path / "out")  # an empty folder is nothing
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="is there already") as caught:
        write_huggingface(trained(), tmp_path / "out", dtype=torch.float32)
    assert caught.value.code == "checkpoint-target"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


class _Breaks(MemorySource):
    def read(self, kind: str, name: str) -> torch.Tensor:
        if name == "layer.bias":
            raise CheckpointError("broken")
        return super().read(kind, name)


@pytest.mark.parametrize("url", ["{tmp}/out", "memory://breaks/out"])
def test_nothing_is_left_of_a_conversion_that_fails(tmp_path: Path, url: str) -> None:
    import fsspec

    with pytest.raises(CheckpointError, match="broken"):
        write_huggingface(_Breaks(everything(trained())), url.format(tmp=tmp_path), max_file_nbytes=100)
    assert os.listdir(tmp_path) == []
    assert fsspec.filesystem("memory").find("/breaks") == []


# hostile input


def header_file(path: Path, table: Any, data: bytes = b"") -> Path:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


F = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("table", "nbytes", "what"),
    [
        ({"a": {**F, "shape": [2**40, 2**40]}}, 8, "has offsets"),
        ({"a": {**F, "shape": [2**62] * 60, "data_offsets": [0, 8]}}, 8, "has offsets"),
        ({"a": {**F, "shape": [1] * 65}}, 8, "not counts"),
        ({"a": {**F, "shape": [-2]}}, 8, "not counts"),
        ({"a": {**F, "shape": [2.0]}}, 8, "not counts"),
        ({"a": {**F, "shape": [True, 2]}}, 8, "not counts"),
        ({"a": {**F, "data_offsets": [8, 16]}}, 8, "begins at byte 8"),
        ({"a": {**F, "data_offsets": [-8, 0]}}, 8, "not counts"),
        ({"a": F, "b": F}, 8, "begins at byte 0"),
        ({"a": F}, 7, "header speaks of"),
        ({"a": F}, 9, "header speaks of"),
        ({"a": {**F, "dtype": "F12"}}, 8, "dtype 'F12'"),
        ({"a": {**F, "extra": 1}}, 8, "not a dtype"),
        ({"a": 3}, 8, "not a dtype"),
        ([], 0, "no table"),
        (b'{"a": 1, "a": 2}', 0, "twice"),
        (b'{"a": ' + b"[" * 100_000, 0, "not the JSON"),
        (b"\xff\xfe", 0, "not the JSON"),
        ({"__metadata__": {"a": 1}}, 0, "metadata"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, table: Any, nbytes: int, what: str) -> None:
    file = header_file(tmp_path / "model.safetensors", table, bytes(nbytes))
    with pytest.raises(CheckpointError, match=what):
        SafetensorsWeights(file)


@pytest.mark.parametrize("content", [b"", b"abc", (2**63).to_bytes(8, "little"), (50).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsWeights(tmp_path)
    assert caught.value.code == "checkpoint-damaged"


@settings(max_examples=60)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_no_byte_of_a_header_leads_to_anything_but_an_error_or_the_same_sizes(at: int, value: int, cut: int) -> None:
    data = bytearray(safetensors.torch.save(in_bf16()))
    data[at % len(data)] = value
    if cut % 3 == 0:
        del data[cut % len(data) :]

    class Held:
        nbytes = len(data)

        def read_into(self, offset: int, target: memoryview) -> None:
            target[:] = data[offset : offset + len(target)]

    try:
        header = read_header(Held(), "here")
    except CheckpointError:
        return
    assert sum(stored.numel * stored.dtype.itemsize for stored in header.tensors.values()) < len(data)


def sharded(folder: Path) -> dict[str, Any]:
    write_huggingface(trained(), folder, dtype=torch.float32, max_file_nbytes=112)
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return index


def test_a_missing_shard_is_named_with_the_number_of_tensors_in_it(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    (tmp_path / "m" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"'model-00002-of-00003.safetensors' of 3 files is missing; \d tensors"):
        HuggingFaceSource(tmp_path / "m")


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "model\n.safetensors"]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    index = sharded(tmp_path / "m")
    safetensors.torch.save_file({"layer.bias": torch.ones(5)}, tmp_path / "outside.safetensors")
    index["weight_map"]["layer.bias"] = name
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceSource(tmp_path / "m")
    assert caught.value.code == "checkpoint-unsafe"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    sharded(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceSource(tmp_path / "m")
    assert caught.value.code == "checkpoint-damaged"


def test_an_index_and_files_that_disagree_are_found(tmp_path: Path) -> None:
    index = sharded(tmp_path / "m")
    index["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="'ghost': the index says where it lies"):
        HuggingFaceSource(tmp_path / "m")
    del index["weight_map"]["ghost"], index["weight_map"]["layer.bias"]
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    source = HuggingFaceSource(tmp_path / "m")
    assert source.about.notes == ["'layer.bias': in a file, but not in the index; left out."]
    assert "layer.bias" not in source.tensors(MODEL)


def test_a_link_is_followed_from_a_snapshot_of_the_cache_to_its_blobs_only(tmp_path: Path) -> None:
    model = tmp_path / "models--a--b"
    snapshot, blobs = model / "snapshots" / "abc", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    safetensors.torch.save_file(KEPT, blobs / "5f3c")
    (snapshot / "model.safetensors").symlink_to("../../blobs/5f3c")
    assert are_equal(everything(HuggingFaceSource(snapshot))[MODEL], KEPT)

    safetensors.torch.save_file(KEPT, tmp_path / "secret")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../../secret")
    with pytest.raises(CheckpointError, match="is a link to") as caught:
        HuggingFaceSource(snapshot)
    assert caught.value.code == "checkpoint-unsafe"

    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "model.safetensors").symlink_to(blobs / "5f3c")
    with pytest.raises(CheckpointError, match="is a link to"):
        HuggingFaceSource(plain)


def test_a_pipe_in_the_place_of_a_file_does_not_block_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a plain file"):
        HuggingFaceSource(tmp_path)
