"""torch.distributed.checkpoint folders: read with no object made of them, and written so that PyTorch loads them."""

from __future__ import annotations

import contextlib
import pickle
import time
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from shoal.checkpoint.formats import safe_unpickling
from shoal.checkpoint.formats.dcp import _EXPECTED, DcpSource, read_metadata
from shoal.checkpoint.formats.dcp_writing import write_dcp
from shoal.checkpoint.formats.torch_file_writing import write_values
from shoal.checkpoint.formats.untrusted_files import UntrustedFolder
from shoal.checkpoint.manifest import MODEL
from shoal.errors import CheckpointError
from tests.helpers.formats_source import are_equal, everything, trained
from tests.unit.checkpoint.test_plain import Canary


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    decayed = [p for name, p in model.named_parameters() if name.endswith("weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    optimizer = torch.optim.AdamW([{"params": decayed, "lr": 0.1}, {"params": others, "weight_decay": 0.0}])
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def save(tree: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=folder, no_dist=True)
    return folder


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_what_fsdp2_users_save_is_read_with_the_optimizer(tmp_path: Path, is_flat: bool, depth: int) -> None:
    model, optimizer = stepped()
    tree: dict[str, Any] = {"model": model.state_dict(), "optim": optimizer_state(model, optimizer, is_flat=is_flat)}
    save({"app": tree} if depth else {**tree, "epoch": 3}, tmp_path / "d")
    source = DcpSource(tmp_path / "d")
    found = everything(source)
    assert list(found) == ["model", "optimizer/exp_avg", "optimizer/exp_avg_sq"]
    assert are_equal(found[MODEL], dict(model.state_dict()))
    for name, parameter in model.named_parameters():
        assert torch.equal(found["optimizer/exp_avg"][name], optimizer.state[parameter]["exp_avg"])
        assert source.about.scalars[name] == {"step": 1.0}
    assert list(source.about.parameters) == [name for name, _ in model.named_parameters()]
    by_decay = {name: source.about.groups[index]["weight_decay"] for name, index in source.about.group_of.items()}
    assert by_decay == {name: 0.01 if name.endswith("weight") else 0.0 for name, _ in model.named_parameters()}
    rates = [source.about.groups[source.about.group_of[name]]["lr"] for name in ("0.weight", "0.bias")]
    assert rates == [0.1, 0.001]
    assert len(source.about.groups) == 2
    assert source.about.groups[0]["betas"] == (0.9, 0.999)
    assert source.about.optimizer == "AdamW"
    assert source.about.notes == ([] if depth else ["'epoch': neither model nor optimizer; left out."])


def test_a_tied_weight_that_pytorch_saved_twice_is_one_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optim": optimizer_state(model, optimizer, is_flat=False)}
    source = DcpSource(save(tree, tmp_path / "d"))
    assert source.about.aliases == {"0.weight": ("2.weight",)}
    assert source.about.notes == ["'2.weight' has the bits of '0.weight' and is not trained: treated as tied."]
    assert list(source.tensors(MODEL)) == list(source.about.parameters)
    assert "2.weight" not in source.tensors(MODEL)
    assert "3.weight" in source.tensors(MODEL)
    assert source.about.optimizer == "SGD"


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda p: torch.optim.Adam(p), "Adam"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "SGD"),
        (lambda p: torch.optim.Adagrad(p), "Adagrad"),
        (lambda p: torch.optim.RMSprop(p), None),
    ],
)
def test_the_optimizers_class_follows_from_its_state_where_possible(
    tmp_path: Path, made: Any, name: str | None
) -> None:
    model = nn.Linear(3, 2)
    optimizer = made(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optim": optimizer_state(model, optimizer, is_flat=False)}
    source = DcpSource(save(tree, tmp_path / "d"))
    assert source.about.optimizer == name
    assert ("the optimizer's class is not stored, and its state does not show it." in source.about.notes) is (
        name is None
    )


def test_a_bare_state_dict_is_read(tmp_path: Path) -> None:
    model, _ = stepped()
    save(dict(model.state_dict()), tmp_path / "d")
    assert are_equal(everything(DcpSource(tmp_path / "d"))[MODEL], dict(model.state_dict()))


def test_a_checkpoint_without_a_model_says_what_is_in_it(tmp_path: Path) -> None:
    save({"net": {"w": torch.ones(2)}, "step": 3}, tmp_path / "d")
    with pytest.raises(CheckpointError, match="no model in it, but 'net', 'step'"):
        DcpSource(tmp_path / "d")


def test_chunks_in_several_files_are_put_together(tmp_path: Path) -> None:
    whole = torch.arange(35.0).view(7, 5)
    metadata = described(size=(7, 5))
    metadata.state_dict_metadata["w"].chunks.clear()
    metadata.storage_data.clear()
    folder = with_metadata(tmp_path / "d", metadata)
    for number, (rows, columns) in enumerate([((0, 4), (0, 5)), ((4, 7), (0, 2)), ((4, 7), (2, 5))]):
        part = whole[rows[0] : rows[1], columns[0] : columns[1]].clone()
        with (folder / f"__{number}_1.distcp").open("wb") as file:
            file.write(b"before")
            write_values(file, part)
            place = _StorageInfo(f"__{number}_1.distcp", 6, file.tell() - 6)
        start = torch.Size([rows[0], columns[0]])
        chunk = torch_metadata.ChunkStorageMetadata(start, part.shape)
        metadata.state_dict_metadata["w"].chunks.append(chunk)
        metadata.storage_data[torch_metadata.MetadataIndex("w", start)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert torch.equal(DcpSource(folder).read(MODEL, "w"), whole)


# writing


def test_what_is_written_is_what_pytorch_loads_without_a_process_group(tmp_path: Path) -> None:
    source = trained()
    write_dcp(source, tmp_path / "out")
    kept = everything(source)
    model = {name: torch.full_like(value, 9) for name, value in kept[MODEL].items()}
    model["head.weight"] = torch.zeros(7, 4)
    state = {
        name: {"exp_avg": torch.zeros_like(value), "exp_avg_sq": torch.zeros_like(value), "step": torch.tensor(0.0)}
        for name, value in kept[MODEL].items()
        if name != "position"
    }
    groups: list[dict[str, Any]] = [{"lr": 0, "betas": 0, "weight_decay": 0, "params": 0}, {"lr": 0, "params": 0}]
    tree = {"model": model, "optim": {"state": state, "param_groups": groups}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tree, checkpoint_id=tmp_path / "out", no_dist=True)
    assert are_equal(model, {**kept[MODEL], "head.weight": kept[MODEL]["embedding.weight"]})
    for name, held in state.items():
        assert torch.equal(held["exp_avg"], kept["optimizer/exp_avg"][name])
        assert torch.equal(held["exp_avg_sq"], kept["optimizer/exp_avg_sq"][name])
        assert held["step"] == 3.0
    assert groups == [
        {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.01, "params": ["embedding.weight", "layer.weight"]},
        {"lr": 0.2, "params": ["layer.bias", "scale", "empty"]},
    ]


def test_what_is_written_comes_back_and_tied_weights_share_their_bytes(tmp_path: Path) -> None:
    source = trained()
    write_dcp(source, tmp_path / "out")
    again = DcpSource(tmp_path / "out")
    kept, found = everything(source), everything(again)
    assert found.keys() == kept.keys()
    assert all(are_equal(found[kind], kept[kind]) for kind in kept)
    assert again.about.aliases == source.about.aliases
    assert again.about.scalars == source.about.scalars
    assert again.about.groups == source.about.groups
    assert again.about.group_of == source.about.group_of
    parts = {item.path: item.parts for item in read_metadata(UntrustedFolder(tmp_path / "out"))}
    assert parts["model", "head.weight"] == parts["model", "embedding.weight"]


def test_a_url_is_refused_before_anything_is_written() -> None:
    with pytest.raises(CheckpointError, match="is not on a file system"):
        write_dcp(trained(), "memory://dcp/out")


# hostile input


def with_metadata(folder: Path, value: Any) -> Path:
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"x" * 100)
    (folder / ".metadata").write_bytes(value if isinstance(value, bytes) else pickle.dumps(value))
    return folder


def described(file: Any = "__0_0.distcp", offset: Any = 0, length: Any = 100, size: Any = (2,)) -> Any:
    properties = torch_metadata.TensorProperties(dtype=torch.float32)
    chunk = torch_metadata.ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))
    tensor = torch_metadata.TensorStorageMetadata(properties, torch.Size(size), [chunk])
    place = _StorageInfo(file, offset, length)
    index = torch_metadata.MetadataIndex("w", [0] * len(size))
    return torch_metadata.Metadata({"w": tensor}, {"w": ("model", "w")}, {index: place})


def test_a_payload_in_the_metadata_is_refused_by_name_and_does_not_run(tmp_path: Path) -> None:
    metadata = described()
    metadata.storage_meta = Canary(tmp_path / "canary")
    folder = with_metadata(tmp_path / "d", metadata)
    with pytest.raises(CheckpointError, match=r"asks for posix\.system") as caught:
        DcpSource(folder)
    assert caught.value.code == "checkpoint-unsafe"
    assert not (tmp_path / "canary").exists()
    pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301
    assert (tmp_path / "canary").exists()  # it would have run


@pytest.mark.parametrize("where", ["tensor", "object"])
def test_a_payload_in_the_data_is_refused_by_name_and_does_not_run(tmp_path: Path, where: str) -> None:
    group = {"lr": Canary(tmp_path / "canary") if where == "object" else 0.1, "params": ["w"]}
    save({"model": {"w": torch.ones(2)}, "optim": {"param_groups": [group]}}, tmp_path / "d")
    if where == "tensor":
        torch.save(Canary(tmp_path / "canary"), tmp_path / "payload")
        payload = (tmp_path / "payload").read_bytes()
        metadata = described(length=len(payload))
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
        (tmp_path / "d" / "__0_0.distcp").write_bytes(payload)
    with pytest.raises(CheckpointError, match=r"asks for posix\.system"):
        DcpSource(tmp_path / "d").read(MODEL, "w")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"file": "../secret"}, "not the name of a file"),
        ({"file": "/etc/passwd"}, "not the name of a file"),
        ({"file": 3}, "a name is a int"),
        ({"file": "none.distcp"}, "is missing"),
        ({"offset": -1}, "lies at -1"),
        ({"offset": 1}, "has 100 bytes, and 'w' lies at 1 with 100"),
        ({"length": 10**18}, "has 100 bytes"),
        ({"length": 1.5}, "1.5 bytes"),
        ({"size": (10**6, 10**6)}, "and 100 bytes"),
        ({"size": (2**62, 2**62)}, "and 100 bytes"),
        ({"size": (1,) * 65}, "a shape is no tuple"),
    ],
)
def test_metadata_that_cannot_be_is_refused(tmp_path: Path, said: dict[str, Any], what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        DcpSource(with_metadata(tmp_path / "d", described(**said)))


def test_a_tensor_with_a_hole_or_an_overlap_is_refused(tmp_path: Path) -> None:
    metadata = described(size=(4,))
    chunks = metadata.state_dict_metadata["w"].chunks
    chunks[0].sizes = torch.Size([3])
    with pytest.raises(CheckpointError, match="'w' is not whole: 3 of 4 elements"):
        DcpSource(with_metadata(tmp_path / "a", metadata))
    chunks.append(torch_metadata.ChunkStorageMetadata(torch.Size([2]), torch.Size([2])))
    metadata.storage_data[torch_metadata.MetadataIndex("w", [2])] = _StorageInfo("__0_0.distcp", 0, 100)
    with pytest.raises(CheckpointError, match="5 of 4 elements"):
        DcpSource(with_metadata(tmp_path / "b", metadata))


def test_data_that_is_not_what_the_metadata_says_is_refused(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2, dtype=torch.float64)}}, tmp_path / "d")
    (tmp_path / "d" / ".metadata").write_bytes(
        pickle.dumps(described(length=(tmp_path / "d" / "__0_0.distcp").stat().st_size))
    )
    with pytest.raises(
        CheckpointError, match=r"holds a torch\.float64 \[2\], and \.metadata says torch\.float32 \[2\]"
    ):
        DcpSource(tmp_path / "d").read(MODEL, "w")


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}}, tmp_path / "d")
    (tmp_path / "d" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        DcpSource(tmp_path / "d")


@pytest.mark.parametrize(
    ("program", "what"),
    [
        (b"\x80\x04cbuiltins\neval\n.", "asks for builtins.eval"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93.", "asks for builtins.exec"),
        (b"\x80\x02(S'x'\nibuiltins\neval\n.", "instruction STRING"),
        (b"\x80\x02(ibuiltins\neval\n.", "instruction INST"),
        (b"\x80\x02\x82\x01.", "instruction EXT1"),
        (b"\x80\x02Ppersistent\n.", "instruction PERSID"),
        (b"\x80\x02K\x01Q.", "instruction BINPERSID"),
        (b"\x80\x04}(K\x01K\x02\x86K\x03u.", "a tuple as a key"),
        (b"\x80\x04K\x01)R.", "a call of something that is no name"),
        (b"\x80\x04K\x01}b.", "a Built was expected"),
        (b"\x80\x04h\x05.", "KeyError"),
        (b"\x80\x04.", "not enough values"),
        (b"\x80\x04K\x01", "ValueError"),
        (b"\x80\x04t.", "IndexError"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.", "ValueError"),
        (b"\x80\x04K\x01t.", "a mark is missing"),
        (b"", "ValueError"),
    ],
)
def test_a_program_that_is_no_plain_data_is_refused(program: bytes, what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        safe_unpickling.read(program, _EXPECTED, "here")


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02K\x01r\xff\xff\xff\x7f.",  # an index of the memo for which a table would take 16 GiB
        b"\x80\x04)" + b"\x94h\x00h\x00\x86" * 60 + b"\x85.",
        b"\x80\x04K\x00" + b"".join(b"\x94h" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60)) + b"\x85.",
        b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".",
    ],
)
def test_a_program_that_would_take_much_memory_or_time_takes_neither(program: bytes) -> None:
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with contextlib.suppress(CheckpointError):
            safe_unpickling.read(program, _EXPECTED, "here")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - began < 5


@settings(max_examples=80)
@given(at=st.integers(0, 100_000), value=st.integers(0, 255))
def test_no_byte_of_a_metadata_file_leads_to_anything_but_an_error_or_data(at: int, value: int) -> None:
    data = bytearray(pickle.dumps(described()))
    data[at % len(data)] = value
    with contextlib.suppress(CheckpointError):  # and nothing else
        safe_unpickling.read(bytes(data), _EXPECTED, "here")


def test_plain_data_comes_back_as_it_was() -> None:
    value = {
        "a": [1, -5, 2**70, 2.5, None, True, b"x", "é" * 300],
        "b": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        3: {4},
    }
    for protocol in (2, 3, 4, 5):
        program = pickle.dumps({key: item for key, item in value.items() if protocol > 3 or key == "b"}, protocol)
        assert safe_unpickling.read(program, (), "here") == pickle.loads(program)  # noqa: S301
