"""Every load compares what all ranks have with the checksums of the save, whatever the two layouts are, and says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.manifest import NAME, OPTIMIZER, dump, parse
from shoal.checkpoint.reader import CheckpointReader
from shoal.comm.threads import run_ranks
from shoal.errors import CheckpointError
from tests.helpers.resuming import Run, engine_of, micro_steps, on_ranks, run_at_stage, stop

HALF = {"bf16": {"enabled": True}}


def saved(folder: Path) -> Any:
    path = next(folder.glob(f"*/{NAME}"))
    return parse(path.read_bytes(), "", 1 << 30)


def loaded(run: Run, folder: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The sentences of all ranks on what they have loaded."""
    caplog.clear()
    with caplog.at_level("INFO", logger="shoal"):
        on_ranks(run, lambda engine: engine.load_checkpoint(str(folder)))
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("loaded ")]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (run_at_stage(0, 2), run_at_stage(3, 3)),
        (run_at_stage(3, 3), run_at_stage(1, 2)),
        (run_at_stage(2, 2, **HALF), run_at_stage(3, 4, zero_optimization={"zero_hpz_partition_size": 2}, **HALF)),
        (run_at_stage(3, 2, zero_optimization={"offload_optimizer": {"device": "cpu"}}), run_at_stage(2, 1)),
    ],
)
def test_all_parameters_and_all_optimizer_state_are_compared_in_any_layout(
    here: Run, there: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop(here, tmp_path, at=2)
    tensors = saved(tmp_path).tensors
    num_parameters = len(dict(here.factory().named_parameters()))
    num_states = sum(tensor.kind.startswith(OPTIMIZER) for tensor in tensors)
    assert num_states == 2 * (num_parameters - 2)  # exp_avg and exp_avg_sq; the layer that is never used has none
    (sentence,) = loaded(there, tmp_path, caplog)
    assert f"saved by {here.world} rank" in sentence
    assert f"{num_states} tensors of optimizer state" in sentence
    assert f"; {num_parameters + num_states} have the checksums of the save." in sentence


def test_a_save_in_the_background_has_the_same_checksums(tmp_path: Path) -> None:
    sums = []
    for name, section in (("now", {}), ("later", {"checkpoint": {"async_save": True}})):
        run = run_at_stage(3, 2, **section)

        def rank(run: Run = run, name: str = name) -> None:
            engine = engine_of(run)
            micro_steps(engine, run, 0, 2)
            engine.save_checkpoint(str(tmp_path / name))
            engine.destroy()

        run_ranks(2, rank)
        sums.append({(t.kind, t.name): t.sums for t in saved(tmp_path / name).tensors if not t.kind.startswith("rank")})
    assert sums[0] == sums[1]
    assert len(set(sums[0].values())) > 20


def test_elements_that_a_load_puts_elsewhere_are_an_error_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(run_at_stage(2, 2), tmp_path, at=1)
    run = CheckpointReader.run

    @torch.no_grad()
    def wrong(self: CheckpointReader, plan: Any) -> None:
        run(self, plan)
        for copies in plan.values():
            for copy in copies:
                if copy.shard.name == "blocks.0.up.weight" and copy.shard.kind == "optimizer/exp_avg":
                    (part,) = copy.shard.part(copy.begin, copy.begin + 2)
                    part.copy_(part.flip(0))
                    return

    def refused(engine: Any) -> CheckpointError:
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path))
        return caught.value

    monkeypatch.setattr(CheckpointReader, "run", wrong)
    for error in on_ranks(run_at_stage(3, 3), refused):
        assert error.code == "checkpoint-sums"
        assert "1 of " in error.what and "optimizer/exp_avg 'blocks.0.up.weight'" in error.what


def test_values_that_are_rounded_are_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop(run_at_stage(2, 2, **HALF), tmp_path, at=1)
    encoded = run_at_stage(2, 2, precision={"state_dtype": "int8"}, **HALF)
    (sentence,) = loaded(encoded, tmp_path, caplog)
    num_parameters = len(dict(encoded.factory().named_parameters()))
    assert f"; {num_parameters} have the checksums of the save." in sentence
    (sentence,) = loaded(
        replace(encoded, settings=encoded.settings | {"checkpoint": {"verify": False}}), tmp_path, caplog
    )
    assert "checksums" not in sentence


def test_a_checkpoint_of_format_1_is_loaded_without_a_comparison(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop(run_at_stage(2, 2), tmp_path, at=1)
    path = next(tmp_path.glob(f"*/{NAME}"))
    old = saved(tmp_path)
    tensors = [tensor.model_copy(update={"sums": None}) for tensor in old.tensors]
    path.write_bytes(dump(old.model_copy(update={"format": 1, "tensors": tensors})))
    (sentence,) = loaded(run_at_stage(3, 3), tmp_path, caplog)
    assert sentence.startswith("loaded global_step1, saved by 2 ranks: 17 parameters and buffers, 30 tensors")
    assert "checksums" not in sentence
