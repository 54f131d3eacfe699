"""The files that ranks write at a failure, as the analyzer of torch's flight recorder reads them."""

from __future__ import annotations

import gc
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.flight_recorder import fr_trace

import shoal
from shoal.comm.protocol import Communicator, Message
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import CommError
from shoal.mesh import Mesh
from tests.helpers.models import Plain
from tests.helpers.training import config, run_steps, start

DEBUGGING = Path(shoal.__file__).parents[1] / "docs" / "how-to" / "debugging.md"


def analyzed(folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[str, list[str]]:
    """Convert a folder as the page on debugging says, and run torch's analyzer.

    Returns: what it prints, and the names of the calls that it has matched on all ranks.
    """
    (code,) = [
        part.split("```")[0]
        for part in DEBUGGING.read_text().split("```python\n")
        if "import pickle" in part.split("```")[0]
    ]
    traces = folder.parent / "traces"
    exec(code.replace("runs/7", str(folder)).replace('"traces"', repr(str(traces))), {})  # noqa: S102 - the page's
    output = folder.parent / "output"
    caplog.clear()
    try:
        with caplog.at_level(logging.INFO, "Flight Recorder"):
            fr_trace.main([str(traces), "-o", str(output)])
    finally:
        gc.enable()  # which the analyzer leaves off
    _, database = pickle.loads(output.read_bytes())  # noqa: S301 - written by the line above
    return caplog.text, [each.collective_name for each in database.collectives if each.pass_check]


def issue_every_verb(comm: Communicator) -> None:
    full, shard = torch.ones(8 * comm.size), torch.ones(8)
    comm.all_gather(full, shard, label="layers: 3").drain()
    comm.reduce_scatter(full, shard.half(), label="layers 3").drain()  # whose result is of another dtype
    comm.all_reduce(full, label="norm").drain()
    splits = [1 + comm.rank] * comm.size, [*range(1, 1 + comm.size)]
    out, source = torch.ones(sum(splits[0])), torch.ones(sum(splits[1]))
    comm.all_to_all(source, out, out_splits=splits[1], source_splits=splits[0], label="tokens").drain()
    comm.broadcast(full, 1, label="seed").drain()
    comm.exchange(shard, label="step").drain()
    comm.gather_objects(comm.rank, label="names")
    comm.barrier(label="start")
    before, behind = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    messages = [Message("recv", shard, before, "activation"), Message("send", full[:8], behind, "activation")]
    comm.batch(messages).drain()


def failed(size: int, folder: Path, odd: Callable[[Communicator, torch.Tensor], object]) -> str:
    """Every verb on two axes, then ``odd`` on rank 1 of axis dp in place of an all_reduce. Returns: the error."""

    def job() -> None:
        world = current_world()
        world.trace_into(str(folder))
        mesh = Mesh.of(size, tp=size // 2)
        dp, every = world.communicator("dp", mesh), world.communicator("world", mesh)
        issue_every_verb(dp)
        issue_every_verb(every)
        issue_every_verb(dp)
        tensor = torch.ones(8)
        if world.rank == 1:
            odd(every, tensor)
        else:
            every.all_reduce(tensor, label="gradient").wait()

    with pytest.raises((CommError, ArithmeticError)) as caught:
        run_ranks(size, job)
    return str(caught.value)


def test_the_analyzer_matches_every_verb_and_names_the_rank_that_runs_another_collective(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "runs"
    failed(4, folder, lambda comm, tensor: comm.all_gather(tensor, label="embedding").wait())
    assert sorted(path.name for path in folder.iterdir()) == [f"rank_{rank}.json" for rank in range(4)]
    text, matched = analyzed(folder, caplog)
    once = [
        "gloo:all_gather of 'layers; 3'", "gloo:reduce_scatter of 'layers 3'", "gloo:all_reduce of 'norm'",
        "gloo:all_to_all of 'tokens'", "gloo:broadcast of 'seed'", "gloo:_all_gather_base exchange of 'step'",
        "gloo:_all_gather_base gather_objects of 'names'", "gloo:barrier of 'start'",
    ]  # fmt: skip
    collectives = [name for name in matched if "->" not in name and "<-" not in name]
    assert sorted(collectives) == sorted(5 * once)  # twice on each of two groups of dp, once on the world
    assert len(matched) - len(collectives) == 2 * 4 + 4  # a message to the next rank of a ring
    assert text.count("has errors") == 1 and "Not all ranks" not in text
    assert "Collective sequence number: 9 has errors" in text
    assert "group info: world of ranks 0 to 3:world" in text
    assert "collective: gloo:all_reduce of 'gradient'" in text
    assert (
        "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH, Expected collective type: 'all_reduce' does not match"
        " found collective type: 'all_gather'"
    ) in text


def test_the_analyzer_names_the_rank_that_runs_one_collective_less(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(comm: Communicator, tensor: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    failed(2, tmp_path / "runs", raises)
    text, _ = analyzed(tmp_path / "runs", caplog)
    assert "Not all ranks joining collective, sequence number: 9" in text
    assert "collective: gloo:all_reduce of 'gradient'" in text and "missing ranks: {1}" in text


def test_the_config_names_the_folder_and_the_files_have_the_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "runs"

    def job() -> None:
        engine = start(Plain, {**config(3), "debug": {"flight_recorder_folder": str(folder)}})
        run_steps(engine, 1)
        if engine.world.rank == 1:
            raise ArithmeticError("on purpose")
        run_steps(engine, 1, first=1)

    with pytest.raises(ArithmeticError):
        run_ranks(2, job)
    text, matched = analyzed(folder, caplog)
    assert sum("reduce_scatter of" in name for name in matched) > 0
    assert "missing ranks: {1}" in text and "has errors" not in text
