"""What a caller of save and load says and gets back: client state, tags, sums, a loop that moves, object stores."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.data import RepeatingLoader
from shoal.errors import CheckpointError
from tests.helpers.resuming import (
    Numbers,
    differences,
    engine_of,
    micro_steps,
    on_ranks,
    refusals,
    resume,
    run_at_stage,
    stop,
)


def test_a_load_in_the_middle_of_a_loop_moves_the_loop(tmp_path: Path) -> None:
    """A run that goes back to its last checkpoint reads again what came after it."""

    def rank() -> list[list[int]]:
        engine = engine_of(run_at_stage(1), training_data=Numbers(53))
        batches = iter(RepeatingLoader(engine.training_dataloader))
        next(batches)
        engine.save_checkpoint(tmp_path)
        first = next(batches).tolist()
        engine.load_checkpoint(tmp_path)
        again = next(batches).tolist()
        engine.destroy()
        return [first, again]

    for first, again in run_ranks(2, rank):
        assert first == again


# client state


def test_client_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "epoch": 3,
        "best": (1.5, "model", None),
        "not a number": math.nan,
        "bounds": [math.inf, -math.inf],
        "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 2),
        "flags": torch.tensor([True, False]),
        "array": np.arange(3, dtype=np.int32),
        "by number": {1: "one", (2, 3): "pair"},
        "set": {1, 2},
        "nested": {"deep": [{"er": (torch.ones(2), [])}]},
        "dtype": torch.float16,
        "__is__": "a name of ours",
        "": 0,
    }
    stop(run_at_stage(), tmp_path, at=1, client_state=state)
    for loaded in (found.client_state for found in resume(run_at_stage(1, 3), tmp_path, at=1)):
        assert list(loaded) == list(state)
        assert math.isnan(loaded["not a number"])
        for key in ("tensor", "scalar", "empty", "flags"):
            assert loaded[key].dtype == state[key].dtype and torch.equal(loaded[key], state[key]), key
        assert loaded["array"].dtype == np.int32 and loaded["array"].tolist() == [0, 1, 2]
        deep = loaded["nested"]["deep"][0]["er"]
        assert isinstance(deep, tuple) and torch.equal(deep[0], torch.ones(2)) and deep[1] == []
        for key in ("epoch", "best", "bounds", "by number", "set", "dtype", "__is__", ""):
            assert loaded[key] == state[key], key


def test_client_state_that_cannot_be_saved_is_named_on_every_rank(tmp_path: Path) -> None:
    def use(engine: shoal.Engine) -> CheckpointError:
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(tmp_path, client_state={"a": [1, {"model": object()}]})
        with pytest.raises(CheckpointError, match="client_state is of type list, not a dict"):
            engine.save_checkpoint(tmp_path, client_state=[("a", 1)])  # type: ignore[arg-type]  # what is wrong
        engine.save_checkpoint(tmp_path, tag="after")
        return caught.value

    errors = on_ranks(run_at_stage(), use)
    for error in errors:
        assert error.code == "checkpoint-state"
        assert "client_state holds a builtins.object" in error.what
    assert "client_state/a/1/model" in str(errors[0])
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["after"]


# tags


def test_tags_name_folders_and_the_newest_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_at_stage(1)

    def save(engine: shoal.Engine) -> None:
        micro_steps(engine, run, 0, 1)
        engine.save_checkpoint(tmp_path)
        micro_steps(engine, run, 1, 1)
        engine.save_checkpoint(tmp_path, tag="best-1.5+a=b")
        micro_steps(engine, run, 2, 1)
        engine.save_checkpoint(tmp_path, tag="aside", save_latest=False)
        for bad in ("../up", "a/b", "", ".hidden", "a b", "x" * 200):
            with pytest.raises(CheckpointError, match="cannot be the name of a folder"):
                engine.save_checkpoint(tmp_path, tag=bad)

    def load(tag: str | None) -> list[Any]:
        def use(engine: shoal.Engine) -> tuple[str, int]:
            path, _ = engine.load_checkpoint(tmp_path, tag=tag)
            return path, engine.global_steps

        return on_ranks(run, use)

    on_ranks(run, save)
    assert (tmp_path / "latest").read_text() == "best-1.5+a=b"
    assert load(None) == [(f"{tmp_path}/best-1.5+a=b", 2)] * 2
    assert load("aside") == [(f"{tmp_path}/aside", 3)] * 2
    assert load("global_step1") == [(f"{tmp_path}/global_step1", 1)] * 2
    (tmp_path / "latest").write_text("global_step1")
    assert load(None) == [(f"{tmp_path}/best-1.5+a=b", 2)] * 2
    assert "latest names 'global_step1', but best-1.5+a=b is newer and whole" in caplog.text
    (tmp_path / "latest").write_text("global_step7")
    assert load(None) == [(f"{tmp_path}/best-1.5+a=b", 2)] * 2
    assert "latest names 'global_step7', which is not there: best-1.5+a=b is loaded" in caplog.text
    (tmp_path / "latest").unlink()
    assert load(None) == [(f"{tmp_path}/best-1.5+a=b", 2)] * 2
    for error in refusals(run, tmp_path, tag="global_step2"):
        assert error.code == "checkpoint-missing"
        assert "global_step1" in str(error) and "best-1.5+a=b" in str(error)
    for error in refusals(run, tmp_path / "nowhere"):
        assert error.code == "checkpoint-missing"
    for error in refusals(run, tmp_path / "aside"):
        assert error.code == "checkpoint-missing"
        assert "load from its parent folder, with its name as the tag" in str(error)


def test_a_tag_that_is_there_is_replaced_as_a_whole(tmp_path: Path) -> None:
    run = run_at_stage(1)
    stop(run, tmp_path, at=1, tag="same")
    saved = stop(replace(run, world=1), tmp_path, at=2, tag="same")
    assert sorted(path.name for path in (tmp_path / "same").iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "same"]
    loaded = resume(run, tmp_path, at=2)
    assert differences(saved, loaded) == []


def test_a_tag_may_be_a_number(tmp_path: Path) -> None:
    saved = stop(run_at_stage(1), tmp_path, at=1, tag=5)
    assert differences(saved, resume(run_at_stage(1), tmp_path, at=1, tag=5)) == []


def test_sums_need_not_be_checked(tmp_path: Path) -> None:
    saved = stop(run_at_stage(1), tmp_path, at=1)
    unchecked = run_at_stage(3, 3, checkpoint={"verify": False})
    assert differences(saved, resume(unchecked, tmp_path, at=1)) == []


def test_client_state_that_is_too_large_for_a_manifest_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    def use(engine: shoal.Engine) -> str:
        with pytest.raises(CheckpointError, match="what is saved beside the tensors is too large") as caught:
            engine.save_checkpoint(tmp_path, client_state={"history": list(range(10**6))})
        engine.save_checkpoint(tmp_path, client_state={"history": torch.arange(10**6)})
        return caught.value.code

    assert on_ranks(run_at_stage(1), use) == ["checkpoint-state"] * 2
    loaded = resume(run_at_stage(1), tmp_path, at=0)
    assert loaded[0].client_state["history"].tolist() == list(range(10**6))


def test_ranks_with_different_tags(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def use(engine: shoal.Engine) -> str:
        try:
            engine.save_checkpoint(tmp_path, tag=f"tag{engine.global_rank}")
        except AssertionError as error:  # as scripts written for DeepSpeed expect it
            return error.code if isinstance(error, CheckpointError) else "another"
        return "saved"

    assert on_ranks(run_at_stage(checkpoint={"tag_validation": "Fail"}), use) == ["checkpoint-tag"] * 2
    assert not any(tmp_path.iterdir())
    assert on_ranks(run_at_stage(), use) == ["saved"] * 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["tag0"]
    assert "the ranks' tags differ (tag0, tag1)" in caplog.text


# object stores


@pytest.mark.parametrize("is_async", [False, True])
def test_an_object_store_can_store_checkpoints(is_async: bool) -> None:
    import fsspec

    url = f"memory://checkpoints-{is_async}"
    run = run_at_stage(3, checkpoint={"async_save": is_async})
    saved = stop(run, url, at=2, client_state={"a": torch.ones(1)})
    stop(run, url, at=1)
    again = stop(run, url, at=2)  # the same tag once more, under new file names
    store = fsspec.filesystem("memory")
    names = sorted(path.rsplit("/", 1)[-1] for path in store.ls(f"/checkpoints-{is_async}/global_step2", detail=False))
    assert len(names) == 3 and names[0] == "manifest.json"
    assert differences(saved, again) == []
    loaded = resume(run_at_stage(1, 3), url, at=2)
    assert differences(saved, loaded) == []
    resume(run, url, at=1, tag="global_step1")
    for error in refusals(run, url, tag="no"):
        assert error.code == "checkpoint-missing"


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    saved = stop(run_at_stage(), f"file://{tmp_path}/x", at=1)
    assert (tmp_path / "x" / "global_step1" / "manifest.json").exists()
    assert differences(saved, resume(run_at_stage(), tmp_path / "x", at=1)) == []


def test_an_unknown_scheme_is_refused() -> None:
    for error in refusals(run_at_stage(), "nothing://x"):
        assert error.code == "checkpoint-storage"
