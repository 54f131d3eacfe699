"""Updates on the host beside the device's work: begun in the backward pass, finished in the next forward, and undone
to the bit where the step wants another one.

The host's memory is treated as another than the device's, so that every copy is made, as on an accelerator.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.engine.engine import Engine
from shoal.errors import NonFiniteError
from shoal.sharding.offloaded_gradient import OffloadedGradient, ShardBuffers
from tests.helpers.any_two import any_two
from tests.ranks.offload.test_offload import MODEL, VOCABULARY, make_apart

STAGES = [(1, ("optimizer",)), (2, ("optimizer",)), (3, ("optimizer",)), (3, ("optimizer", "param"))]
Between = Callable[[Engine, int], None]


def config(
    stage: int, places: tuple[str, ...], *, precision: str = "bf16", clip: float = 0.0, accumulation: int = 1
) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    for place in places:
        zero[f"offload_{place}"] = {"device": "cpu"}
    if "optimizer" in places:
        zero["offload_optimizer"]["super_offload"] = True
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "units": {"classes": ["Linear"]},
    }
    if precision != "fp32":
        found[precision] = {"enabled": True}
    return found


def train(settings: dict[str, Any], between: Between | None = None, steps: int = 4) -> dict[str, Any]:
    """Train; ``between`` is called before each ``step()`` with the number of the step."""
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    losses = []
    for number in range(steps * engine.gradient_accumulation_steps()):
        generator = torch.Generator().manual_seed(10 * number + engine.global_rank)
        tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
        loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        if between is not None:
            between(engine, number)
        engine.step()
        losses.append(float(loss.detach()))
    values = {
        f"master {name}": engine.access.full_parameter(p)
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            for key in ("exp_avg", "exp_avg_sq"):
                values[f"{key} {name}"] = engine.access.full_optimizer_state(parameter, key)
    values |= engine.module_state_dict()
    cpu = engine.sharding.step.cpu_optimizer
    counts = (0, 0) if cpu is None else (cpu.num_ahead, cpu.num_undone)
    engine.destroy()
    return {"losses": losses, "values": values, "counts": counts}


def pair(
    stage: int, places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, between: Between | None = None, **keys: Any
) -> list[tuple[int, int]]:
    """Train on the device alone and beside the host; everything is equal to the bit. Returns: counts of each rank."""
    make_apart(monkeypatch, is_apart=False)
    plain = run_ranks(2, train, config(stage, (), **keys), between)
    make_apart(monkeypatch)
    away = run_ranks(2, train, config(stage, places, **keys), between)
    for one, other in zip(plain, away, strict=True):
        assert one["losses"] == other["losses"]
        for name, value in one["values"].items():
            assert torch.equal(value, other["values"][name]), name
    return [result["counts"] for result in away]


@any_two({"stage, places": STAGES, "precision": ["bf16", "fp16", "fp32"], "accumulation": [1, 2]})
def test_updates_in_the_backward_pass_give_the_same_bits(
    stage: int, places: tuple[str, ...], precision: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = pair(stage, places, monkeypatch, precision=precision, accumulation=accumulation)
    # fp32 with both on the host: the main parameters are the parameters, which the backward pass may still need.
    is_possible = precision != "fp32" or "param" not in places
    assert all((ahead > 0) is is_possible and undone == 0 for ahead, undone in counts)


@pytest.mark.parametrize(("stage", "places"), STAGES)
def test_clipping_that_comes_after_the_update_undoes_it(
    stage: int, places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = pair(stage, places, monkeypatch, clip=0.001)
    # The second step finds that the first one's norm was clipped, and so does every later one.
    assert counts == [(0, 0), (0, 0)]
    norms: list[float] = []
    counts = pair(stage, places, monkeypatch, between=lambda engine, number: norms.append(number), clip=1e9)
    assert all(ahead > 0 and undone == 0 for ahead, undone in counts)


def sometimes_clipped(engine: Engine, number: int) -> None:
    if number == 2:
        for parameter in engine.module.parameters():
            if parameter.requires_grad and engine.access.full_gradient(parameter) is not None:
                engine.access.set_full_gradient(parameter, torch.full(parameter.shape, 5.0))


@pytest.mark.parametrize(("stage", "places"), STAGES)
def test_a_gradient_that_was_set_after_the_backward_pass_counts(
    stage: int, places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = pair(stage, places, monkeypatch, sometimes_clipped)
    assert all(ahead > 0 and undone > 0 for ahead, undone in counts)


def other_rate(engine: Engine, number: int) -> None:
    if number == 2:
        engine.optimizer.param_groups[0]["lr"] = 0.001


@pytest.mark.parametrize(("stage", "places"), STAGES)
def test_a_learning_rate_that_was_set_after_the_backward_pass_counts(
    stage: int, places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = pair(stage, places, monkeypatch, other_rate)
    assert all(ahead > 0 and undone > 0 for ahead, undone in counts)


@pytest.mark.parametrize(("stage", "places"), STAGES)
def test_between_backward_and_step_main_parameters_are_those_of_the_last_step(
    stage: int, places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[dict[str, torch.Tensor]]] = {0: [], 1: []}

    def main_parameters(engine: Engine, _: int) -> None:
        seen[engine.global_rank].append(
            {n: engine.access.full_parameter(p) for n, p in engine.module.named_parameters() if p.requires_grad}
        )

    counts = pair(stage, places, monkeypatch, main_parameters)
    assert all(undone > 0 for _, undone in counts)
    plain, away = seen[0][:4], seen[0][4:]
    assert len(plain) == len(away) == 4
    for one, other in zip(plain, away, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def dropped(engine: Engine, number: int) -> None:
    if number == 2:
        engine.zero_grad()
        tokens = torch.arange(10).view(2, 5)
        engine.backward(engine(tokens).float().square().mean())


@pytest.mark.parametrize(("stage", "places"), STAGES)
def test_a_gradient_that_was_dropped_leaves_no_trace(
    stage: int, places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = pair(stage, places, monkeypatch, dropped)
    assert all(undone > 0 for _, undone in counts)


def second_loss(engine: Engine, number: int) -> None:
    if number == 2:
        tokens = torch.arange(10).view(2, 5)
        engine.backward(engine(tokens).float().square().mean())


@pytest.mark.parametrize(("stage", "places"), STAGES)
def test_a_second_backward_pass_before_the_step_counts(
    stage: int, places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = pair(stage, places, monkeypatch, second_loss)
    assert all(ahead > 0 and undone > 0 for ahead, undone in counts)


def overflow(settings: dict[str, Any]) -> tuple[bool, int]:
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    tokens = torch.arange(10).view(2, 5)
    for _ in range(2):
        engine.backward(engine(tokens).float().square().mean())
        engine.step()
    before = {n: engine.access.full_parameter(p) for n, p in engine.module.named_parameters() if p.requires_grad}
    engine.backward(engine(tokens).float().square().mean() * float("inf"))
    with suppress(NonFiniteError):
        engine.step()
    after = {n: engine.access.full_parameter(p) for n, p in engine.module.named_parameters() if p.requires_grad}
    undone = engine.sharding.step.cpu_optimizer.num_undone
    engine.destroy()
    return all(torch.equal(value, after[name]) for name, value in before.items()), undone


@pytest.mark.parametrize(("stage", "places"), STAGES)
def test_a_step_that_is_skipped_is_undone(stage: int, places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    make_apart(monkeypatch)
    for is_same, undone in run_ranks(2, overflow, config(stage, places)):
        assert is_same
        assert undone > 0


def saved(settings: dict[str, Any], folder: str) -> bool:
    """A checkpoint between backward and step has the state after the last step."""
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    tokens = torch.arange(10).view(2, 5)
    for _ in range(2):
        engine.backward(engine(tokens).float().square().mean())
        engine.step()
    before = {n: engine.access.full_parameter(p) for n, p in engine.module.named_parameters() if p.requires_grad}
    engine.backward(engine(tokens).float().square().mean())
    engine.save_checkpoint(folder)
    engine.step()
    engine.load_checkpoint(folder)
    after = {n: engine.access.full_parameter(p) for n, p in engine.module.named_parameters() if p.requires_grad}
    engine.step()
    engine.destroy()
    return all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_checkpoint_between_backward_and_step_has_the_last_step(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_apart(monkeypatch)
    assert run_ranks(2, saved, config(3, ("optimizer", "param")), str(tmp_path)) == [True, True]


def waits(settings: dict[str, Any]) -> list[str]:
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    tokens = torch.arange(10).view(2, 5)
    engine.backward(engine(tokens).float().square().mean())
    engine.step()
    cpu, order, gate = engine.sharding.step.cpu_optimizer, [], threading.Event()
    start = cpu._step.start

    def slow(*args: Any, **keys: Any) -> Any:
        gate.wait(30)
        order.append("updated")
        return start(*args, **keys)

    cpu._step.start = slow
    engine.backward(engine(tokens).float().square().mean())
    engine.step()
    order.append("step returned")
    gate.set()
    engine(tokens)
    order.append("forward returned")
    engine.destroy()
    return order


@pytest.mark.parametrize("places", [("optimizer",), ("optimizer", "param")])
def test_the_step_returns_before_updates_on_the_host_and_the_next_forward_waits(
    places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_apart(monkeypatch)
    settings = config(3, places)
    del settings["zero_optimization"]["offload_optimizer"]["super_offload"]
    for order in run_ranks(2, waits, settings):
        assert order[0] == "step returned"
        assert order.count("updated") == 3  # two blocks, and what is left
        assert order[-1] == "forward returned"


def breaks(settings: dict[str, Any]) -> None:
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    tokens = torch.arange(10).view(2, 5)
    engine.backward(engine(tokens).float().square().mean())
    engine.step()

    def fails(*args: Any, **keys: Any) -> Any:
        raise MemoryError("no room for the scratch")

    engine.sharding.step.cpu_optimizer._step.start = fails
    try:
        engine.backward(engine(tokens).float().square().mean())
        engine.step()
        engine(tokens)
    finally:
        engine.destroy()


@pytest.mark.parametrize(("stage", "places"), STAGES)
def test_an_update_that_fails_is_raised_by_who_waits_for_it(
    stage: int, places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_apart(monkeypatch)
    with pytest.raises((MemoryError, shoal.ShoalError), match="no room for the scratch"):
        run_ranks(1, breaks, config(stage, places))


def device_gradients(settings: dict[str, Any]) -> tuple[set[int], int, int, int]:
    """Addresses of the device memory that gradients are reduced into, its bytes, a block's, and the ledger's."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(6)))
    engine, *_ = shoal.initialize(model=model, config=settings)
    seen: set[int] = set()
    cpu = engine.optimizer.sharded_step.cpu_optimizer
    plain = cpu.send_gradient

    def send(group: Any, *, at_step: bool) -> None:
        seen.add(group.gradient.owned().data_ptr())
        plain(group, at_step=at_step)

    cpu.send_gradient = send
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    owned = engine.sharded.units[1].trained[0].owned_numel * 4
    nbytes = sum(each.nbytes for each in engine.sharded.staging if isinstance(each, ShardBuffers))
    ledger = engine.memory_report().by_kind()["buffers in flight"]
    engine.destroy()
    return seen, nbytes, owned, ledger


def test_gradients_on_their_way_to_the_host_use_three_buffers_which_the_ledger_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_apart(monkeypatch)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "units": {"classes": ["Linear"]},
    }
    for seen, nbytes, owned, ledger in run_ranks(2, device_gradients, settings):
        assert len(seen) == 3  # two are reduced into while one is copied
        assert nbytes == 3 * owned
        assert ledger >= nbytes


def accumulates(settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float], int, int, int]:
    """Main parameters and norms; bytes of gradients that went to the host, and fetches back, in a step; bytes of all.

    The bytes of all are those of this rank's gradients, once.
    """
    engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
    cpu, sent, norms = engine.sharding.step.cpu_optimizer, [], []
    gradients = [group.gradient for group in engine.sharding.groups]
    is_managed = settings.get("managed_gradient_accumulation", True)
    if cpu is not None:
        plain = cpu._copy

        def count(source: torch.Tensor, target: torch.Tensor, *, is_source_freed: bool = False) -> Any:
            sent.append(source.nbytes * is_source_freed)
            return plain(source, target, is_source_freed=is_source_freed)

        cpu._copy = count
    for number in range(6):
        generator = torch.Generator().manual_seed(10 * number + engine.global_rank)
        tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
        if number == 3:
            sent.clear()
        engine.backward(torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten()))
        if is_managed or number % 3 == 2:
            engine.step()
        if number % 3 == 2:
            norms.append(engine.get_global_grad_norm())
    fetches = sum(gradient.num_fetches for gradient in gradients if isinstance(gradient, OffloadedGradient))
    values = {n: engine.access.full_parameter(p) for n, p in engine.module.named_parameters() if p.requires_grad}
    nbytes = sum(gradient.nbytes for gradient in gradients)
    engine.destroy()
    return values, norms, sum(sent), fetches, nbytes


@pytest.mark.parametrize(
    ("keys", "world", "fetches"),
    [
        ({}, 2, 0),
        ({"managed_gradient_accumulation": False}, 2, 0),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, 2, 0),
        # The sum over the replicas needs the whole sum on the device, once a step.
        ({"zero_optimization": {"mics_shard_size": 2}}, 4, 1),
    ],
    ids=["managed", "unmanaged", "16-bit sum", "replicas"],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_micro_batches_are_added_on_the_host_and_the_sum_does_not_return_to_the_device(
    stage: int, keys: dict[str, Any], world: int, fetches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings(*places: str) -> dict[str, Any]:
        made = config(stage, places, accumulation=3, clip=0.5)
        return {**made, **keys, "zero_optimization": {**made["zero_optimization"], **keys.get("zero_optimization", {})}}

    make_apart(monkeypatch, is_apart=False)
    plain = run_ranks(world, accumulates, settings())
    make_apart(monkeypatch)
    for one, (values, norms, sent, fetched, nbytes) in zip(
        plain, run_ranks(world, accumulates, settings("optimizer")), strict=True
    ):
        assert norms == one[1]
        assert all(torch.equal(value, one[0][name]) for name, value in values.items())
        parts = 3 if "data_types" not in keys else 1 + 2 * 2  # parts of a 16-bit sum are sent in fp32
        assert sent == parts * nbytes
        assert fetched == fetches * 2 * 3  # in 2 steps, of 3 groups


def gathers_ahead(settings: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Where the host waits in a forward; then the units gathered, in order, with the forwards between them.

    The update of each unit takes until the forward of the unit before it has run.
    """
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    engine, *_ = shoal.initialize(model=model, config=settings)
    cpu, order, stalls = engine.sharding.step.cpu_optimizer, [], []
    has_run = [threading.Event() for _ in range(4)]
    plain = cpu._on_thread

    def slowly(update: Callable[[], Any], name: str) -> Any:
        number = len(started)
        started.append(number)

        def run() -> Any:
            if number and not has_run[number - 1].wait(3):
                stalls.append(f"the forward of unit {number - 1} waits for the update of unit {number}")
            return update()

        return plain(run, name)

    for step in range(3):
        if step == 2:
            started: list[int] = []
            cpu._on_thread = slowly
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()

    def has_computed(number: int, *_: Any) -> None:
        order.append(f"forward {number}")
        has_run[number].set()

    for number, layer in enumerate(model):
        layer.register_forward_hook(partial(has_computed, number), prepend=True)  # before Shoal's post-forward
    with current_world().recorder.recording() as entries:
        for unit in engine.sharded.sharded:
            start = unit.start_gather
            unit.start_gather = lambda start=start, unit=unit, **how: (
                order.append(f"gather {unit.name}") if unit.is_released else None,
                start(**how),
            )
        engine(torch.ones(2, 8))
    assert len(entries) == 4
    found = list(order)  # destroy() gathers too
    engine.destroy()
    return stalls, found


def test_a_unit_is_gathered_ahead_once_its_update_is_done_and_no_forward_waits_for_the_next_units_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_apart(monkeypatch)
    settings = config(3, ("optimizer",), precision="fp32")
    del settings["zero_optimization"]["offload_optimizer"]["super_offload"]
    for stalls, order in run_ranks(2, gathers_ahead, settings):
        assert stalls == []
        assert order == [
            *("gather 0", "forward 0", "gather 1", "forward 1"),
            *("gather 2", "forward 2", "gather 3", "forward 3"),
        ]
