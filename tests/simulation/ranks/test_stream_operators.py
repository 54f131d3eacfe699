"""Operators of compiled code, called without a compiler: what runs inside of them is checked as other code is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.models import GPT
from shoal.parallel.expert.stacked import ExpertFeedForward
from shoal.parallel.sequence.attention import attention
from shoal.simulation.check import StreamCheck
from tests.helpers.stream_changes import changed
from tests.helpers.training import adamw, batch, config, make, start_with
from tests.ranks.parallel.expert.test_gpt import SHAPE

STEPS = 4


def trained(**more: Any) -> list[tuple[StreamCheck, int, list[float]]]:
    """Of each rank the check, how often the host waited in the last step, and the losses."""

    def rank() -> tuple[StreamCheck, int, list[float]]:
        with shoal.check_streams(raises=False) as check:
            engine = start_with(make(lambda: GPT(SHAPE, experts=ExpertFeedForward)), config(2, **more), adamw)
            engine.module.attend_by(attention)
            losses, context = [], engine.sequence_context
            for step in range(STEPS):
                before = check.host_reads
                given = [each[:, :4] for each in batch(step, engine.axes.batch.rank, 2)]
                if context is not None:
                    given = [*map(context.shard, given), context.positions(4)]
                loss = engine(*given)
                engine.backward(loss)
                engine.step()
                num_reads = (check.host_reads - before).total()
                losses.append(loss.item())
            engine.destroy()
        return check, num_reads, losses

    return run_ranks(2, rank)


@pytest.mark.parametrize(
    ("more", "num_reads"),
    [
        ({"parallel": {"ep": 2}}, 1 + SHAPE.num_layers),
        ({"parallel": {"ep": 2}, "activation_checkpointing": {"modules": ["Block"]}}, 1 + SHAPE.num_layers),
        ({"parallel": {"sp": 2}}, 1 + SHAPE.num_layers),
        ({"parallel": {"cp": 2}}, 1 + SHAPE.num_layers),
    ],
    ids=str,
)
def test_operators_wait_where_they_must_and_for_no_more(
    more: dict[str, Any], num_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(**more)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    for (check, reads, losses), (expected, _, values) in zip(trained(**more), plain, strict=True):
        assert check.findings == []
        assert check.num_operations > expected.num_operations  # those inside, and the operators
        assert reads == num_reads
        assert losses == values


def test_a_write_of_rows_that_an_operator_sends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    sent = '        )\n\n    def wait(self) -> Tensor:\n        """The received rows.'
    with changed("shoal/parallel/expert/dispatch.py", sent, sent.replace(")", ")\n        rows.mul_(1)", 1)):
        checks = [check for check, _, _ in trained(parallel={"ep": 2})]
    found = [str(finding) for check in checks for finding in check.findings]
    assert any("aten.mul_.Tensor" in each and "all_to_all 'experts dispatch" in each for each in found)
