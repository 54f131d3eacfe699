"""Damaged and hostile checkpoints: every bit counts, nothing runs, and saying no costs neither time nor memory."""

from __future__ import annotations

import ast
import errno
import json
import os
import pickle
import random
import shutil
import stat
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.checkpoint import directory
from shoal.checkpoint.reader import CheckpointReader
from shoal.checkpoint.rectangles import Rectangle, cover_problem, rectangles
from shoal.errors import CheckpointError
from tests.helpers.checkpoint_maker import local, make, newest, read, rewrite, values

NUM_FLIPS = 10_000
MOST_SECONDS = 1.0
MOST_BYTES = 64 << 20
Raw = dict[str, Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints; the tests spoil the second."""
    folder = tmp_path / "run"
    for step in (1, 2):
        make(local(folder), step)
    return folder


def flip(path: Path, bit: int) -> None:
    """Turn one bit of a file over; once more turns it back."""
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def test_not_one_of_ten_thousand_flipped_bits_is_read_in_silence(root: Path) -> None:
    storage = local(root)
    reader = CheckpointReader(storage, "step2", directory.inspect(storage, "step2"))
    names = {file.name: index for index, file in enumerate(reader.manifest.files)}
    paths = [*sorted((root / "step2").iterdir()), root / "latest"]
    bits = [(path, bit) for path in paths for bit in range(path.stat().st_size * 8)]
    generator = random.Random(20)
    num_silent = 0
    for _ in range(NUM_FLIPS):
        path, bit = generator.choice(bits)
        flip(path, bit)
        if path.name == "latest":  # a hint: it names another checkpoint, or none
            num_silent += directory.read_latest(storage) == "step2"
        else:
            said = ""
            try:
                if path.name in names:
                    reader.check_file(names[path.name])
                else:
                    directory.inspect(storage, "step2")
            except CheckpointError as error:
                said = str(error)
            num_silent += path.name not in said
        flip(path, bit)
    assert num_silent == 0
    assert torch.equal(read(storage, "step2"), values(2))


def test_a_flipped_bit_is_reported_with_its_file_both_sums_and_the_tensors_in_its_block(root: Path) -> None:
    storage = local(root)
    path = root / "step2" / "rank-00001.safetensors"
    flip(path, path.stat().st_size * 8 - 1)
    with pytest.raises(CheckpointError) as caught:
        read(storage, "step2")
    text = str(caught.value)
    recorded = directory.inspect(storage, "step2").files[1].blocks[0]
    assert "rank-00001.safetensors" in text
    assert f"and {recorded} was written" in text
    assert "their xxh3 sum is " in text
    [problem] = directory.verify(storage, "step2")
    assert "model 'w'[3:6, 0:5]" in str(problem)
    assert torch.equal(newest(storage), values(1))


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def folder_in_place_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda root: os.truncate(root / "step2" / FIRST, 100),
    "longer": lambda root: os.truncate(root / "step2" / FIRST, 1000),
    "empty": lambda root: os.truncate(root / "step2" / SECOND, 0),
    "missing": lambda root: (root / "step2" / SECOND).unlink(),
    "of another rank": lambda root: shutil.copy(root / "step2" / FIRST, root / "step2" / SECOND),
    "swapped between ranks": lambda root: swap(root / "step2" / FIRST, root / "step2" / SECOND),
    "of another step": lambda root: shutil.copy(root / "step1" / FIRST, root / "step2" / FIRST),
    "a folder": lambda root: folder_in_place_of(root / "step2" / FIRST),
    "manifest empty": lambda root: os.truncate(root / "step2" / "manifest.json", 0),
    "manifest truncated": lambda root: os.truncate(root / "step2" / "manifest.json", 200),
    "manifest missing": lambda root: (root / "step2" / "manifest.json").unlink(),
    "manifest of another step": lambda root: shutil.copy(
        root / "step1" / "manifest.json", root / "step2" / "manifest.json"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_and_an_older_checkpoint_taken(root: Path, damage: str) -> None:
    DAMAGES[damage](root)
    storage = local(root)
    problems = directory.verify(storage, "step2")
    assert problems
    assert {problem.code for problem in problems} == {"checkpoint-damaged"}
    assert torch.equal(newest(storage), values(1))
    with pytest.raises(CheckpointError):
        read(storage, "step2")


def test_files_that_the_manifest_does_not_name_are_never_read(root: Path) -> None:
    (root / "step2" / "rank-00002.safetensors").write_bytes(b"nonsense")
    (root / "step2" / "notes.txt").write_text("of the user")
    assert torch.equal(newest(local(root)), values(2))


# nothing runs


class Payload:
    """What a pickle of it does when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("kind", ["pickle", "torch"])
@pytest.mark.parametrize("name", [FIRST, SECOND, "manifest.json", "latest", "all"])
def test_a_pickle_in_the_place_of_any_file_never_runs(root: Path, tmp_path: Path, kind: str, name: str) -> None:
    canary = tmp_path / "canary"
    paths = [root / "step2" / FIRST, root / "step2" / SECOND, root / "step2" / "manifest.json", root / "latest"]
    for path in paths:
        if name in (path.name, "all"):
            with open(path, "wb") as file:
                (pickle.dump if kind == "pickle" else torch.save)(Payload(canary), file)
    storage = local(root)
    directory.read_latest(storage)
    for found in directory.list_checkpoints(storage):
        directory.verify(storage, found.folder)
    if name == "latest":
        assert torch.equal(read(storage, "step2"), values(2))
    else:
        with pytest.raises(CheckpointError):
            read(storage, "step2")
        assert torch.equal(newest(storage), values(1))
    assert not canary.exists()
    pickle.loads(pickle.dumps(Payload(canary)))  # noqa: S301
    assert canary.exists(), "the payload works"


def test_no_source_can_turn_data_into_code() -> None:
    """Besides the calls that test_house forbids: the other ways to execute the contents of a file."""
    forbidden = {
        "__import__", "compile", "importlib.import_module", "importlib.util.spec_from_file_location", "runpy.run_path",
        "runpy.run_module", "torch.jit.load", "torch.package.PackageImporter", "torch.hub.load", "joblib.load",
        "numpy.fromregex", "ctypes.CDLL",
    }  # fmt: skip
    found = []
    room = Path(shoal.__file__).parent / "checkpoint"
    for path in sorted(room.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in forbidden:
                found.append(f"{path.name}:{node.lineno} {ast.unparse(node.func)}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.append(f"{path.name} allow_pickle")
    assert found == []


def test_only_one_class_unpickles_and_it_looks_names_up_in_a_list() -> None:
    """``torch.distributed.checkpoint``'s metadata is a pickle; its reader allows the few names that it must have."""
    places = {}
    for path in sorted(Path(shoal.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text())
        classes = [
            node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
            and any("Unpickler" in ast.unparse(base) for base in node.bases)
        ]  # fmt: skip
        if "pickle" in {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}:
            places[path.name] = [{f.name for f in c.body if isinstance(f, ast.FunctionDef)} for c in classes]
    assert len(places) <= 1, places
    for methods in places.values():
        assert len(methods) == 1
        assert {"find_class"} <= methods[0]


# hostile manifests


def set_at(*path: Any, to: Any) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        place: Any = raw
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return change


def text_at(marker: str, *path: Any, to: str) -> Callable[[Raw], bytes]:
    """Put JSON text that ``json.dumps`` would not write."""

    def change(raw: Raw) -> bytes:
        set_at(*path, to=marker)(raw)
        return json.dumps(raw).replace(json.dumps(marker), to, 1).encode()

    return change


def append(key: str, make_item: Callable[[Raw], Any]) -> Callable[[Raw], None]:
    return lambda raw: raw[key].append(make_item(raw))


def cut_into(count: int, *, is_overlapping: bool) -> Callable[[Raw], None]:
    """A tensor in so many parts of one element each."""

    def change(raw: Raw) -> None:
        file = raw["files"][0]
        file["nbytes"] = 4 * count
        file["blocks"] = ["0"] * -(-4 * count // file["block_nbytes"])
        at = [0] + [0 if is_overlapping else 1] + list(range(2, count))
        raw["tensors"][0] |= {"shape": [1, count], "chunks": [[0, 4 * i, [0, at[i]], [1, 1]] for i in range(count)]}

    return change


def many_dims(raw: Raw) -> None:
    dims = 40
    raw["tensors"][0] |= {
        "shape": [2] * dims,
        "chunks": [[0, 0, [0] * dims, [1] * dims]] * 2,
    }


CHUNK = ("tensors", 0, "chunks", 0)
LIES: dict[str, Callable[[Raw], Any]] = {
    "file above": set_at("files", 0, "name", to="../step1/rank-00000.safetensors"),
    "file with dots": set_at("files", 0, "name", to="a..safetensors"),
    "file absolute": set_at("files", 0, "name", to="/etc/passwd"),
    "file below": set_at("files", 0, "name", to="a/rank-00000.safetensors"),
    "file without a name": set_at("files", 0, "name", to=""),
    "file is the manifest": set_at("files", 0, "name", to="manifest.json"),
    "file with a zero byte": set_at("files", 0, "name", to="a\0b"),
    "file with a line break": set_at("files", 0, "name", to="rank-00000.safetensors\n"),
    "file twice": append("files", lambda raw: raw["files"][0]),
    "file longer than any": set_at("files", 0, "nbytes", to=10**18),
    "file negative": set_at("files", 0, "nbytes", to=-1),
    "file beyond integers": set_at("files", 0, "nbytes", to=10**30),
    "blocks of everything": set_at("files", 0, "block_nbytes", to=10**18),
    "blocks of nothing": set_at("files", 0, "block_nbytes", to=0),
    "block sums missing": set_at("files", 0, "blocks", to=[]),
    "block sums of numbers": set_at("files", 0, "blocks", to=[1] * 1_000_000),
    "offset huge": set_at(*CHUNK, 1, to=10**18),
    "offset negative": set_at(*CHUNK, 1, to=-4),
    "offset in the middle": set_at(*CHUNK, 1, to=65),
    "offset a float": set_at(*CHUNK, 1, to=64.0),
    "offset a truth": set_at(*CHUNK, 1, to=True),
    "offset a text": set_at(*CHUNK, 1, to="64"),
    "chunk in no file": set_at(*CHUNK, 0, to=7),
    "chunk of too many dims": set_at(*CHUNK, 3, to=[3, 5, 1]),
    "chunk outside": set_at(*CHUNK, 2, to=[10**9, 0]),
    "chunk empty": set_at(*CHUNK, 3, to=[0, 5]),
    "chunk huge": set_at(*CHUNK, 3, to=[10**9, 10**9]),
    "chunks overlap in the tensor": set_at("tensors", 0, "chunks", 1, 2, to=[2, 0]),
    "chunks overlap in the file": append("tensors", lambda raw: {**raw["tensors"][0], "name": "again"}),
    "chunk missing": lambda raw: raw["tensors"][0]["chunks"].pop(),
    "shape huge": set_at("tensors", 0, "shape", to=[10**18, 10**18]),
    "shape of many dims": set_at("tensors", 0, "shape", to=[1] * 1000),
    "dtype unknown": set_at("tensors", 0, "dtype", to="object"),
    "tensor twice": append("tensors", lambda raw: raw["tensors"][0]),
    "tensor in very many parts that overlap": cut_into(40_000, is_overlapping=True),
    "tensor cut in very many dims": many_dims,
    "parameter of another shape": set_at("parameters", 0, "shape", to=[5, 6]),
    "parameter twice": append("parameters", lambda raw: raw["parameters"][0]),
    "parameter name endless": set_at("parameters", 0, "name", to="x" * 100_000),
    "key unknown": set_at("surprise", to=1),
    "keys unknown": lambda raw: raw.update({f"k{i}": 0 for i in range(100_000)}),
    "keys unknown in a record": lambda raw: raw["tensors"][0].update({f"k{i}": 0 for i in range(100_000)}),
    "versions by the thousand": lambda raw: raw["versions"].update({f"v{i}": 0 for i in range(100_000)}),
    "parameters of nothing": set_at("parameters", to=[{}] * 50_000),
    "format a text": set_at("format", to="1"),
    "format zero": set_at("format", to=0),
    "not a number": text_at("@", "step", to="NaN"),
    "not a number in the client's state": text_at("@", "client_state", to='{"x": NaN}'),
    "infinity": text_at("@", "client_state", to='{"x": -Infinity}'),
    "number of a million digits": text_at("@", "step", to="9" * 1_000_000),
    "lists in lists": text_at("@", "client_state", to="[" * 60_000 + "]" * 60_000),
    "lists in lists, not too many": text_at("@", "client_state", to="[" * 900 + "]" * 900),
    "empty lists by the million": text_at("@", "client_state", to="[" + "[]," * 1_000_000 + "[]]"),
    "empty objects by the million": text_at("@", "config", to='{"a":[' + "{}," * 1_000_000 + "{}]}"),
    "no object": lambda raw: b"[1, 2, 3]",
    "no JSON": lambda raw: b"{nonsense",
    "no text": lambda raw: b'{"tag": "\xff\xfe"}',
    "nothing": lambda raw: b"{}",
    "longer than allowed": lambda raw: json.dumps(raw).encode() + b" " * (8 << 20),
}


def memory(key: str) -> int:
    """Of this process, in bytes: ``VmRSS`` now, ``VmHWM`` at the most since it was reset."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused_quickly_and_without_much_memory(root: Path, lie: str) -> None:
    rewrite(root / "step2", LIES[lie])
    storage = local(root)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    except OSError as error:
        pytest.skip(f"the kernel does not measure this process's peak: {error}")
    before, began = memory("VmRSS"), time.process_time()
    with pytest.raises(CheckpointError) as caught:
        directory.inspect(storage, "step2")
    assert time.process_time() - began < MOST_SECONDS
    assert memory("VmHWM") - before < MOST_BYTES
    assert caught.value.code in ("checkpoint-damaged", "checkpoint-unsafe")
    assert len(str(caught.value)) < 2000
    assert torch.equal(newest(storage), values(1))


def test_what_is_large_and_true_is_read(root: Path) -> None:
    """The limits above do not refuse what a save writes: many parts, and a long list of the client's."""
    rewrite(root / "step2", set_at("client_state", to={"seen": list(range(300_000))}))
    assert torch.equal(read(local(root), "step2"), values(2))


def test_a_save_whose_manifest_could_not_be_read_again_is_refused(root: Path) -> None:
    storage = local(root)
    for state in ({"seen": list(range(10**6))}, {"seen": [[i] for i in range(200_000)]}):
        with pytest.raises(CheckpointError, match="what is saved beside the tensors is too large") as caught:
            make(storage, 3, client_state=state)
        assert caught.value.code == "checkpoint-state"
    assert sorted(os.listdir(root)) == ["latest", "step1", "step2"]


def test_a_newer_format_is_refused_with_both_versions(root: Path) -> None:
    def newer(raw: Raw) -> None:
        raw |= {"format": 3, "versions": {"shoal": "9.1"}, "surprise": [1, 2, 3]}

    rewrite(root / "step2", newer)
    with pytest.raises(
        CheckpointError, match=r"format 3 and was written by Shoal 9\.1; this one reads up to 2"
    ) as caught:
        directory.inspect(local(root), "step2")
    assert caught.value.code == "checkpoint-version"


def in_place_of(name: str, put: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(root: Path) -> None:
        path = root / "step2" / name
        path.rename(root.parent / f"true-{name}")
        put(path)

    return change


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # endless zeros
        with open(path, "rb"):
            pass
    except PermissionError as error:
        pytest.skip(f"devices cannot be made here: {error}")


NO_FILES: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to(path.parent.parent.parent / f"true-{path.name}"),
    "pipe": os.mkfifo,
    "endless device": device,
    "endless link": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("name", [FIRST, "manifest.json"])
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_plain_file_is_refused_at_once(root: Path, kind: str, name: str) -> None:
    in_place_of(name, NO_FILES[kind])(root)
    began = time.monotonic()
    for action in (directory.inspect, read):
        with pytest.raises(CheckpointError, match="checkpoint"):
            action(local(root), "step2")
    assert torch.equal(newest(local(root)), values(1))
    assert time.monotonic() - began < 5 * MOST_SECONDS


@pytest.mark.parametrize("kind", NO_FILES)
def test_a_hint_that_is_no_plain_file_names_nothing(root: Path, kind: str) -> None:
    (root / "latest").unlink()
    NO_FILES[kind](root / "latest")
    assert directory.read_latest(local(root)) is None


def test_a_link_to_a_checkpoint_elsewhere_is_no_checkpoint(root: Path, tmp_path: Path) -> None:
    (root / "step2").rename(tmp_path / "elsewhere")
    (root / "step2").symlink_to(tmp_path / "elsewhere")
    assert [found.folder for found in directory.list_checkpoints(local(root))] == ["step1"]


def test_a_file_that_becomes_a_link_after_it_was_looked_at_is_not_followed(root: Path, tmp_path: Path) -> None:
    storage = local(root)
    reader = CheckpointReader(storage, "step2", directory.inspect(storage, "step2"))
    (root / "step2" / FIRST).rename(tmp_path / "elsewhere")
    (root / "step2" / FIRST).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=os.strerror(errno.ELOOP)):
        reader.tensor("model", "w")


def test_a_manifest_of_holes_allocates_no_memory(root: Path) -> None:
    """Files with holes are long and use no space: their length must not be trusted."""
    (root / "step2" / "extra.safetensors").touch()
    os.truncate(root / "step2" / "extra.safetensors", 1 << 42)
    os.truncate(root / "step2" / "manifest.json", 1 << 36)
    Path("/proc/self/clear_refs").write_text("5")
    before, began = memory("VmRSS"), time.process_time()
    with pytest.raises(CheckpointError):
        directory.inspect(local(root), "step2")
    assert time.process_time() - began < MOST_SECONDS
    assert memory("VmHWM") - before < MOST_BYTES


# do parts hold every element once?


def test_parts_of_a_flat_partition_cover_a_tensor_and_moved_ones_do_not() -> None:
    generator = random.Random(3)
    num_whole = num_not = 0
    for _ in range(4000):
        shape = tuple(generator.randint(1, 4) for _ in range(generator.randint(0, 4)))
        numel = torch.empty(shape, device="meta").numel()
        cuts = sorted({0, numel, *(generator.randint(0, numel) for _ in range(3))})
        parts = [r for low, high in pairwise(cuts) for r in rectangles(shape, low, high)]
        if shape and generator.random() < 0.5:
            part = parts.pop(generator.randrange(len(parts)))
            dim = generator.randrange(len(shape))
            start = list(part.start)
            start[dim] = generator.randint(0, shape[dim] - part.shape[dim])
            parts.append(Rectangle(tuple(start), part.shape))
        counts = torch.zeros(shape, dtype=torch.int64)
        for part in parts:
            counts[tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))] += 1
        is_whole = bool((counts == 1).all())
        assert (cover_problem(shape, parts) is None) == is_whole, (shape, parts)
        num_whole, num_not = num_whole + is_whole, num_not + (not is_whole)
    assert min(num_whole, num_not) > 500


def test_no_parts_cover_only_a_tensor_without_elements() -> None:
    assert cover_problem((0, 3), []) is None
    assert cover_problem((2, 3), []) == "0 of 6 elements are there"
    assert cover_problem((), [Rectangle((), ())]) is None
    assert cover_problem((), [Rectangle((), ())] * 2) == "2 of 1 elements are there"
