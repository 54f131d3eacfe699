"""Files of torch.save: read where they hold tensors only, written one tensor after the other."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.formats.plain import PlainSource, write_plain
from shoal.checkpoint.formats.torch_file_writing import write_tensors, write_values
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.portable import TensorInfo
from shoal.errors import CheckpointError
from tests.helpers.formats_source import MemorySource, are_equal, everything, trained

KEPT = everything(trained())[MODEL]


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def with_alias(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "head.weight": tensors["embedding.weight"]}


@pytest.mark.parametrize("mmap", [False, True])
def test_fp32_is_what_torch_load_reads_with_every_name_of_a_tied_weight(tmp_path: Path, mmap: bool) -> None:
    write_plain(trained(), tmp_path / "out.bin")
    found = torch.load(tmp_path / "out.bin", weights_only=True, mmap=mmap)
    assert are_equal(found, with_alias(KEPT))
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()


def test_without_a_dtype_it_is_the_models_own(tmp_path: Path) -> None:
    write_plain(trained(), tmp_path / "out.bin", None)
    found = torch.load(tmp_path / "out.bin", weights_only=True)
    assert {name: value.dtype for name, value in found.items()} == {
        **dict.fromkeys(with_alias(KEPT), torch.bfloat16),
        "position": torch.int64,
    }
    assert torch.equal(found["layer.weight"], KEPT["layer.weight"].bfloat16())


def test_the_file_is_a_zip_file_with_right_sums_and_aligned_tensors(tmp_path: Path) -> None:
    write_plain(trained(), tmp_path / "out.bin")
    with zipfile.ZipFile(tmp_path / "out.bin") as archive:
        assert archive.testzip() is None
        assert archive.namelist()[:3] == ["archive/data.pkl", "archive/byteorder", "archive/data/0"]
    reader = torch._C.PyTorchFileReader(str(tmp_path / "out.bin"))
    assert [reader.get_record_offset(f"data/{index}") % 64 for index in range(6)] == [0] * 6


def test_every_dtype_goes_there_and_back() -> None:
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = {str(dtype): torch.arange(0, 4).to(dtype).view(2, 2) for dtype in dtypes}
    tensors["a name in 日本"] = torch.tensor([[True], [False]])
    stream = io.BytesIO()
    write_tensors(stream, {n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in tensors.items()}, tensors.__getitem__)
    found = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    assert list(found) == list(tensors)
    for name, value in tensors.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))


def test_other_names_of_a_tensor_are_the_same_object() -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.arange(4.0)}
    stream = io.BytesIO()
    write_tensors(
        stream,
        {n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in tensors.items()},
        tensors.__getitem__,
        aliases={"b": ("c", "d")},
    )
    found = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    assert list(found) == ["a", "b", "c", "d"]
    assert found["b"] is found["c"] is found["d"]
    assert torch.equal(found["b"], tensors["b"])


def test_a_single_tensor_can_be_at_any_offset_of_a_file() -> None:
    stream = io.BytesIO(b"before")
    stream.seek(6)
    write_values(stream, KEPT["layer.weight"].t())
    found = torch.load(io.BytesIO(stream.getvalue()[6:]), weights_only=True)
    assert torch.equal(found, KEPT["layer.weight"].t())


def test_a_dtype_that_the_format_lacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"torch\.uint16"):
        write_plain(MemorySource({MODEL: {"a": torch.zeros(2, dtype=torch.uint16)}}), tmp_path / "out", None)
    assert os.listdir(tmp_path) == []


# reading


@pytest.mark.parametrize("key", [None, "state_dict", "model_state_dict", "model", "module"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_state_dict_is_found_bare_or_nested(tmp_path: Path, key: str | None, is_zip: bool) -> None:
    content: Any = OrderedDict(with_alias(KEPT))
    if key is not None:
        content = {key: content, "epoch": 3, "best": torch.ones(2)}
    torch.save(content, tmp_path / "m.pt", _use_new_zipfile_serialization=is_zip)
    source = PlainSource(tmp_path / "m.pt")
    assert are_equal(everything(source)[MODEL], KEPT)
    assert source.about.aliases == {"embedding.weight": ("head.weight",)}
    assert sorted(source.about.parameters) == ["embedding.weight", "empty", "layer.bias", "layer.weight", "scale"]
    notes = [] if key is None else [f"the file holds 'epoch', 'best' beside {key!r}; left out."]
    assert source.about.notes == notes


def test_views_come_back_contiguous_and_whole(tmp_path: Path) -> None:
    big = torch.arange(20.0).view(4, 5)
    torch.save({"a": big.t(), "b": big[1:3], "c": big}, tmp_path / "m.pt")
    source = PlainSource(tmp_path / "m.pt")
    assert torch.equal(source.read(MODEL, "a"), big.t())
    assert source.read(MODEL, "a").is_contiguous()
    assert torch.equal(source.read(MODEL, "b"), big[1:3])
    assert source.about.aliases == {}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants", "ignore:Sparse invariant checks")
def test_what_is_no_tensor_in_a_state_dict_is_noted(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "version": 3, "sparse": torch.eye(2).to_sparse()}, tmp_path / "m.pt")
    source = PlainSource(tmp_path / "m.pt")
    assert list(source.tensors(MODEL)) == ["a"]
    assert source.about.notes == ["'version', 'sparse' in the state_dict: not a plain tensor; left out."]


def test_a_folder_of_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    names = list(KEPT)
    for number, part in enumerate((names[:3], names[3:]), 1):
        torch.save({name: KEPT[name] for name in part}, tmp_path / f"pytorch_model-{number:05d}-of-00002.bin")
    weight_map = {name: f"pytorch_model-{1 + (name in names[3:]):05d}-of-00002.bin" for name in names}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(f'{{"weight_map": {weight_map}}}'.replace("'", '"'))
    assert are_equal(everything(PlainSource(tmp_path))[MODEL], KEPT)
    index.write_text('{"weight_map": {"a": "../x.bin"}}')
    with pytest.raises(CheckpointError) as caught:
        PlainSource(tmp_path)
    assert caught.value.code == "checkpoint-unsafe"
    index.write_text('{"weight_map": {"a": "pytorch_model-00009-of-00002.bin"}}')
    with pytest.raises(CheckpointError, match=r"00009-of-00002\.bin is missing"):
        PlainSource(tmp_path)


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, torch.ones(2), {}])
def test_a_file_without_a_state_dict_says_what_is_in_it(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="no state_dict") as caught:
        PlainSource(tmp_path / "m.pt")
    assert caught.value.code == "checkpoint-format"


# hostile input


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_that_asks_for_more_is_refused_by_name_and_nothing_runs(tmp_path: Path, is_zip: bool) -> None:
    canary = tmp_path / "canary"
    content = {"a": torch.ones(2), "b": Canary(canary)}
    torch.save(content, tmp_path / "m.pt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError) as caught:
        PlainSource(tmp_path / "m.pt")
    assert not canary.exists()
    assert "asks for posix.system" in caught.value.what
    assert caught.value.code == "checkpoint-unsafe"
    torch.load(tmp_path / "m.pt", weights_only=False)
    assert canary.exists()  # it would have run


def test_a_bare_pickle_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    with pytest.raises(CheckpointError):
        PlainSource(tmp_path / "m.pt")
    assert not (tmp_path / "canary").exists()


def test_a_whole_model_is_refused_with_the_class_that_it_asks_for(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"asks for .*torch\.nn\.modules\.linear\.Linear"):
        PlainSource(tmp_path / "m.pt")


def test_a_compressed_file_is_refused_before_it_unfolds(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "m.pt") as old, zipfile.ZipFile(tmp_path / "n.pt", "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="is compressed") as caught:
        PlainSource(tmp_path / "n.pt")
    assert caught.value.code == "checkpoint-unsafe"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_an_error(tmp_path: Path, share: float) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "m.pt")
    data = (tmp_path / "m.pt").read_bytes()
    (tmp_path / "m.pt").write_bytes(data[: int(share * len(data))])
    with pytest.raises(CheckpointError) as caught:
        PlainSource(tmp_path / "m.pt")
    assert caught.value.code == "checkpoint-damaged"


def test_a_tensor_larger_than_its_bytes_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "m.pt").open("wb") as file:
        write_tensors(file, {"a": TensorInfo(torch.float32, (1 << 40,))}, lambda name: torch.ones(4))
    with pytest.raises(CheckpointError):
        PlainSource(tmp_path / "m.pt")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.pt"):
        PlainSource(tmp_path / "none.pt")
