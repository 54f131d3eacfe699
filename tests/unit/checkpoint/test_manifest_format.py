"""The manifest's bytes: what is written is read, and one of another format, or with a hole, is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.manifest import FileRecord, Manifest, ParameterRecord, TensorRecord
from shoal.errors import CheckpointError


def example(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "tag": "global_step10",
        "step": 10,
        "created": "2026-01-02T03:04:05.000006+00:00",
        "versions": {"shoal": "0.1.0", "torch": "2.13.0", "python": "3.11.0"},
        "world": {"size": 2, "dp_shard": 2, "stage": 3},
        "groups": [{"lr": 0.1, "betas": {"__is__": "tuple", "items": [0.9, 0.99]}}],
        "optimizer": "AdamW",
        "parameters": [
            ParameterRecord(
                name="layers.0.w",
                aliases=["head.w"],
                dtype="bfloat16",
                shape=(4, 5),
                group=0,
                scalars={"step": {"__is__": "scalar", "dtype": "float32", "value": 10.0}},
            )
        ],
        "tensors": [
            TensorRecord(
                kind="model",
                name="layers.0.w",
                dtype="float32",
                shape=(4, 5),
                chunks=[(0, 128, (0, 0), (2, 5)), (1, 64, (2, 0), (2, 5))],
            )
        ],
        "files": [
            FileRecord(name="rank-00000.safetensors", nbytes=168, block_nbytes=4 << 20, blocks=["0" * 16]),
            FileRecord(name="rank-00001.safetensors", nbytes=104, block_nbytes=4 << 20, blocks=["f" * 16]),
        ],
        "engine": {"counters": {"global_steps": 10}, "schedule": None, "big": 2**70, "tiny": 5e-324},
        "client_state": {"größe": [1, None, True, "\u2028"]},
    }
    return Manifest(**{**values, **changes})


def again(body: dict[str, Any]) -> bytes:
    """Another body with a checksum that fits."""
    rest = json.dumps(body)[1:].encode()
    return f'{{"checksum":"xxh3:{manifests.checksum(rest)}",\n'.encode() + rest


def body_of(manifest: Manifest) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(manifests.dump(manifest))
    del body["checksum"]
    return body


def test_what_is_written_is_read() -> None:
    manifest = example()
    data = manifests.dump(manifest)
    assert data.startswith(b'{"checksum":"xxh3:')
    assert json.loads(data)["format"] == 2  # the whole file is JSON
    found = manifests.parse(data, "here")
    assert found == manifest
    assert found.find("model", "layers.0.w") == manifest.tensors[0]
    assert found.find("model", "layers.1.w") is None
    assert found.nbytes == 272
    assert manifests.dump(found) == data


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(), st.text())
def test_numbers_and_text_are_read_to_the_last_bit(number: float, integer: int, text: str) -> None:
    found = manifests.parse(manifests.dump(example(client_state=[number, integer, {text: text}])), "here")
    assert repr(found.client_state) == repr([number, integer, {text: text}])


def test_every_byte_counts() -> None:
    data = manifests.dump(example())
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(CheckpointError) as caught:
            manifests.parse(bytes(changed), "here")
        assert caught.value.code == "checkpoint-damaged"
    for length in range(0, len(data), 7):
        with pytest.raises(CheckpointError) as caught:
            manifests.parse(data[:length], "here")
        assert caught.value.code == "checkpoint-damaged"


def test_a_newer_format_is_refused_with_both_versions_before_anything_else_is_looked_at() -> None:
    body = body_of(example()) | {"format": 7, "tensors": "of another kind", "new key": 1}
    body["versions"]["shoal"] = "9.5.0"
    with pytest.raises(CheckpointError) as caught:
        manifests.parse(again(body), "here")
    assert caught.value.code == "checkpoint-version"
    assert "has format 7 and was written by Shoal 9.5.0; this one reads up to 2" in caught.value.what


@pytest.mark.parametrize("number", [0, -1, True, "1", 1.0, None])
def test_a_format_that_is_no_number_is_damage(number: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        manifests.parse(again(body_of(example()) | {"format": number}), "here")
    assert caught.value.code == "checkpoint-damaged"


@pytest.mark.parametrize("key", ["tag", "step", "parameters", "tensors", "files", "versions"])
def test_a_key_that_is_missing_is_named(key: str) -> None:
    body = body_of(example())
    del body[key]
    with pytest.raises(CheckpointError, match=key):
        manifests.parse(again(body), "here")


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([[0, 128, [0, 0], [2, 5]]], "10 of 20 elements"),
        ([[0, 128, [0, 0], [2, 5]], [1, 64, [1, 0], [2, 5]]], "not whole"),
        ([[0, 128, [0, 0], [2, 5]], [1, 64, [3, 0], [2, 5]]], "is not inside"),
        ([[0, 128, [0, 0], [2, 5]], [2, 64, [2, 0], [2, 5]]], "file 2 of 2"),
        ([[0, 128, [0, 0], [2, 5]], [1, 68, [2, 0], [2, 5]]], "lies at 68"),
        ([[0, 128, [0, 0], [2, 5]], [0, 124, [2, 0], [2, 5]]], "overlap"),
        ([[0, 126, [0, 0], [2, 5]], [1, 64, [2, 0], [2, 5]]], "lies at 126"),
        ([[0, 128, [0], [10]], [1, 64, [2, 0], [2, 5]]], "dims"),
    ],
)
def test_chunks_that_cannot_be_are_refused(chunks: list[Any], words: str) -> None:
    body = body_of(example())
    body["tensors"][0]["chunks"] = chunks
    with pytest.raises(CheckpointError, match=words) as caught:
        manifests.parse(again(body), "here")
    assert caught.value.code == "checkpoint-unsafe"
