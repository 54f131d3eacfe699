"""A step of a model under a configuration, dry: the figures of ``shoal.dry_run`` without a script."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.parts.activations import SavedActivations
from shoal.errors import UsageError
from shoal.models import GPT, GPTConfig
from shoal.parallel.recompute_blocks import device_nbytes
from shoal.planner.dry_model import dry_run_model
from shoal.simulation.collective_times import link_nbytes
from shoal.simulation.times import COMMUNICATION, STAGES, UPDATE
from tests.helpers.dry_runs import take_steps

SHAPE = GPTConfig(vocab_size=512, sequence_length=64, num_layers=4, hidden_size=64, num_heads=4)


def gpt() -> nn.Module:
    return GPT(SHAPE)


def config(stage: int = 0, accumulation: int = 1, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        **sections,
    }


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_it_is_the_third_step_of_a_script(device: str) -> None:
    made = config(zero_optimization={"stage": 3, "offload_optimizer": {"device": device}})
    made["gradient_accumulation_steps"] = 2
    step = dry_run_model(gpt, made, 8)
    with shoal.dry_run(8) as run:
        engine, *_ = shoal.initialize(model=gpt(), config=made)
        tokens = torch.zeros(2, 64, dtype=torch.long)
        take_steps(run, engine, tokens, 3, num_micro=2)
        engine.destroy()
    last = run.steps[-1]
    assert step.seconds == pytest.approx(last.seconds)
    assert step.received == last.received
    assert step.memory.allocated == pytest.approx(last.memory.allocated, rel=0.002)
    assert step.exposed_communication == pytest.approx(last.by_kind[COMMUNICATION])
    assert step.bubble == 0 and step.fits


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_is_not_shorter_than_its_updates_on_the_host(stage: int) -> None:
    """What the updates of a step leave to the next forward, that of the step before left to this one."""
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    wide = replace(SHAPE, num_layers=2, hidden_size=4096, num_heads=32)
    step = dry_run_model(lambda: GPT(wide), config(zero_optimization=zero), 1)
    assert step.stages[0].busy[UPDATE] > 0.5 * step.seconds
    assert step.stages[0].busy[UPDATE] <= step.seconds


@pytest.mark.parametrize("every", [1, 2])
def test_activations_in_host_memory_are_those_of_the_ledger_and_not_on_the_device(every: int) -> None:
    shape = replace(SHAPE, num_layers=8)

    def run(**activation: Any) -> tuple[int, int, int]:
        """Bytes of activations: on the device at the peak of forward; by the ledger on the host, and of the budget."""
        with shoal.dry_run(1) as run:
            engine, *_ = shoal.initialize(model=GPT(shape), config=config(activation_checkpointing=activation))
            tokens = torch.zeros(2, 64, dtype=torch.long)
            for _ in range(2):
                with run.step():
                    loss = engine(tokens, tokens)
                report = engine.memory_report().entries
                with run.step():
                    engine.backward(loss)
                    engine.step()
            part = engine.part(SavedActivations)
            assert part is not None
            of = [entry.nbytes for entry in report if (entry.kind, entry.tier) == ("saved activations", "host")]
            engine.destroy()
            if part.budget is None:
                return run.steps[2].memory.by_kind["activation"], sum(of), 0
            sizes = [{name: pair[at] for name, pair in part.budget.saved.items()} for at in (0, 1)]
            policies = part.budget.policies
            whole = {name: size * (policies[name] == "offload") for name, size in sizes[1].items()}
            budget = device_nbytes(policies, *sizes)
            again = max((sizes[1][name] for name in policies if policies[name] == "recompute"), default=0)
            assert sum(of) >= 0.99 * sum(whole.values())  # small tensors stay; two views of one are copied twice
            return run.steps[2].memory.by_kind["activation"], sum(of), sum(sizes[1].values()) - (budget - again)

    plain, *_ = run()
    kept, on_host, less = run(memory_budget=1_400_000, offload_every=every)
    assert on_host > 0
    assert plain - kept == pytest.approx(less, rel=0.03)


def test_tensor_parallel_ranks_of_several_nodes_wait_longer_for_each_other() -> None:
    wide = replace(SHAPE, sequence_length=2048, num_layers=2, hidden_size=2048, num_heads=16)
    inside, across = (
        dry_run_model(lambda: GPT(wide), config(1, parallel={"tp": 4, "order": order}), 32)
        for order in (["dp_shard", "tp"], ["tp", "dp_shard"])
    )
    assert across.seconds > 1.05 * inside.seconds
    assert across.exposed_communication > 1.5 * inside.exposed_communication
    assert across.received == inside.received
    assert across.links["the network"] > inside.links["the network"]
    assert across.memory.by_kind == inside.memory.by_kind


def test_pipeline_stages_of_one_node_send_over_its_links() -> None:
    parallel = {"pp": 4, "dp_shard": 4}
    across, inside = (
        dry_run_model(gpt, config(1, 4, parallel={**parallel, "order": order}), 16)
        for order in (["pp", "dp_shard"], ["dp_shard", "pp"])
    )
    assert [link_nbytes("recv", 8, ranks, 8)[1] for ranks in ((0, 4), (4, 8))] == [0, 8]
    assert across.received == inside.received
    assert inside.stages[1].links["the network"] < inside.received["recv"]
    assert across.stages[2].links["the network"] >= across.received["recv"] / 2
    assert inside.stages[0].received == across.stages[0].received


def test_a_pipeline_is_run_as_one() -> None:
    step = dry_run_model(gpt, config(1, 4, parallel={"pp": 2, "tp": 2}), 8)
    assert len(step.stages) == 2
    assert step.received["recv"] == 4 * 2 * 64 * 64 * 2  # micro-batches, rows, tokens, width, bytes of bf16
    assert step.bubble == pytest.approx(sum(one.by_kind[STAGES] / one.seconds for one in step.stages) / 2) != 0
    assert step.memory.reserved == max(one.memory.reserved for one in step.stages)


def test_rows_are_split_over_ranks_of_a_sequence() -> None:
    parts = dry_run_model(gpt, config(1, parallel={"cp": 2}), 4).stages[0]
    whole = dry_run_model(gpt, config(1), 4).stages[0]
    assert parts.memory.by_kind["activation"] < 0.6 * whole.memory.by_kind["activation"]


def test_a_model_of_another_kind_has_its_batches_and_loss_from_the_caller() -> None:
    def batch(rows: int) -> tuple[torch.Tensor]:
        return (torch.zeros(rows, 32),)

    def squares(output: torch.Tensor) -> torch.Tensor:
        return output.float().square().mean()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))

    def run(**options: Any) -> Any:
        return dry_run_model(build, {**config(), "bf16": {"enabled": False}}, 2, **options)

    assert run(batch=batch, loss=squares).received["all_reduce"] >= 4 * (33 * 32 + 33 * 8)
    with pytest.raises(UsageError, match="Sequential has no config"):
        run()
    with pytest.raises(UsageError, match="returned a FakeTensor without a loss"):
        run(batch=batch)
    with pytest.raises(UsageError, match="rows of 63 tokens cannot be divided among 2 ranks"):
        dry_run_model(gpt, config(parallel={"sp": 2}), 2, sequence=63)


def test_bytes_are_told_by_link_a_ring_enters_each_node_once() -> None:
    step = dry_run_model(gpt, config(1), 16)  # two nodes of 8
    received = step.received["all_gather"] + step.received["reduce_scatter"]
    assert step.links["the network"] == pytest.approx(received / 8, rel=0.01)
    assert sum(step.links.values()) == pytest.approx(sum(step.received.values()), rel=0.001)
    assert link_nbytes("all_gather", 1600, range(16), 8) == (1312.5, 187.5)
    assert link_nbytes("all_to_all", 1600, range(16), 8) == (700, 800)
    assert link_nbytes("all_reduce", 1600, (0, 8), 8) == (0, 1600)
    assert link_nbytes("recv", 1600, (0, 1), 8) == (1600, 0)


def test_a_model_that_is_named_attends_over_the_ranks_of_sp_and_cp() -> None:
    parallel = {"sp": 2, "cp": 2}
    named = dry_run_model("nano", config(parallel=parallel), 4, sequence=64)
    assert named.received["all_to_all"] > 0 < named.received["recv"]
    assert "all_to_all" not in dry_run_model(gpt, config(parallel=parallel), 4, sequence=64).received  # it is told so


@pytest.mark.parametrize("name", ["Adagrad", "Lion", "RMSprop", "Lamb", "Muon"])
def test_an_optimizer_that_is_named_runs_dry(name: str) -> None:
    """Adagrad has its state before the first step."""
    step = dry_run_model(gpt, config(3, optimizer={"type": name, "params": {"lr": 1e-3}}), 4)
    assert step.received["all_gather"] > 0 and step.fits
