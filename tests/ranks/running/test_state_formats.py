"""Optimizer state in other formats than fp32, against one process that does the same arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.memory.disk import DiskTier
from shoal.sharding.encoded_state import BLOCK
from shoal.sharding.layout import ParameterSpec, Segment
from shoal.sharding.stochastic_rounding import round_stochastically
from tests.helpers import composition_runs
from tests.helpers.composition import AXES, settings_of
from tests.helpers.models import Plain
from tests.helpers.training import Trained, adamw, batch, config, finish, main_parameters, make, run_steps, start

STEPS = 3
Owned = dict[str, list[tuple[int, int]]]  # by parameter, its parts by rank


def one_code(values: torch.Tensor, state_dtype: str, key: str) -> torch.Tensor:
    """One block as it is after encoding and decoding, by the formulas of the module's docstring."""
    steps = {("int8", "exp_avg"): 127.0, ("int8", "exp_avg_sq"): 255.0, ("fp8", "exp_avg_sq"): 448.0}
    most = steps.get((state_dtype, key), 448.0)
    is_root = (state_dtype, key) != ("fp8", "exp_avg")
    scale = (values.abs().max() / (most**2 if is_root else most)).bfloat16().float()
    if scale == 0:
        return torch.zeros_like(values)
    numbers = values / scale
    if is_root:
        numbers = numbers.sign() * numbers.abs().sqrt()
    if state_dtype == "int8":
        numbers = numbers.round()
        if key == "exp_avg_sq":
            numbers = numbers.clamp_min(1.0)
    else:
        numbers = numbers.to(torch.float8_e4m3fn).float()
        if key == "exp_avg_sq":
            numbers = numbers.clamp_min(2.0**-9)
    return scale * (numbers * numbers.abs() if is_root else numbers)


def in_blocks(value: torch.Tensor, parts: list[tuple[int, int]], state_dtype: str, key: str) -> torch.Tensor:
    """A parameter's state after encoding and decoding. ``parts``: what each rank owns of it."""
    flat, result = value.flatten(), torch.empty(value.numel())
    for begin, end in parts:
        edges = [begin, *(at for at in range(0, end, BLOCK) if begin < at < end), end]
        for low, high in pairwise(edges):
            result[low:high] = one_code(flat[low:high], state_dtype, key)
    return result.view_as(value)


def owned_parts(engine: shoal.Engine) -> Owned:
    """By parameter, what each rank of the group owns of it."""
    found: Owned = {}
    for group in engine.sharded.groups:
        buffer = group.buffer
        ranks = range(buffer.layout.num_shards)
        extents = [buffer.layout.owned(rank) for rank in ranks] if group.row.state.is_sharded else [(0, 1 << 40)]
        for spec in buffer.layout.specs:
            places = [(max(low - spec.offset, 0), min(high - spec.offset, spec.numel)) for low, high in extents]
            found[spec.name] = [(low, high) for low, high in places if low < high]
    return found


def train(stage: int, state_dtype: str, **sections: Any) -> tuple[Trained, Owned]:
    engine = start(Plain, config(stage, precision={"state_dtype": state_dtype}, **sections), adamw)
    owned = owned_parts(engine)
    return finish(engine, run_steps(engine, STEPS)), owned


def emulate(owned: Owned, state_dtype: str, num_ranks: int) -> dict[str, torch.Tensor]:
    """The parameters after ``STEPS`` steps of all ranks, in one process."""
    model = make(Plain)
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        total: dict[str, torch.Tensor] = {}
        for rank in range(num_ranks):
            model.zero_grad()
            model(*batch(step, rank, num_ranks)).backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    total[name] = p.grad.clone() if rank == 0 else total[name] + p.grad
        for name, p in model.named_parameters():
            p.grad = total[name] * (1 / num_ranks) if name in total else None
        optimizer.step()
        for name, p in model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                if p in optimizer.state:
                    optimizer.state[p][key] = in_blocks(optimizer.state[p][key], owned[name], state_dtype, key)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("state_dtype", ["int8", "fp8"])
def test_a_run_has_the_bits_of_one_process_that_does_the_same(
    stage: int, state_dtype: str, ranks: Callable[..., Any]
) -> None:
    results = ranks(2, train, stage, state_dtype)
    wanted = emulate(results[0][1], state_dtype, 2)
    plain = ranks(2, train, stage, "fp32")
    for trained, _ in results:
        for name, value in trained.main_parameters.items():
            assert torch.equal(value, wanted[name]), name
    assert not all(torch.equal(value, wanted[name]) for name, value in plain[0][0].main_parameters.items())


def state_of(engine: shoal.Engine) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's state, decoded, by parameter."""
    states = engine.optimizer.state
    return {
        name: {key: value.clone() for key, value in states[p].items() if value.dim()}
        for name, p in engine.module.named_parameters()
    }


def resume(settings: dict[str, Any], to: dict[str, Any], folder: Path) -> tuple[Any, ...]:
    """Parameters and state after four steps, and the same resumed after two of them; and the state as it was loaded."""
    engine = start(Plain, settings, adamw)
    run_steps(engine, 2)
    engine.save_checkpoint(folder)
    saved = state_of(engine)
    run_steps(engine, 2, first=2)
    on = main_parameters(engine), state_of(engine)
    engine.destroy()
    engine = start(Plain, to, adamw)
    assert engine.load_checkpoint(folder)[0] is not None
    loaded = state_of(engine)
    run_steps(engine, 2, first=2)
    continued = main_parameters(engine), state_of(engine)
    engine.destroy()
    return saved, loaded, on, continued


def is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    return all(
        is_equal(value, other[key]) if isinstance(value, dict) else torch.equal(value, other[key])
        for key, value in one.items()
    )


RESUMED: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "disk": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 alone": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "async": {"checkpoint": {"async_save": True}},
}


@pytest.mark.parametrize(("stage", "state_dtype"), [(1, "fp8"), (3, "int8")])
@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_has_the_bits_of_the_one_that_went_on(
    case: str, stage: int, state_dtype: str, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    sections = {key: dict(value) for key, value in RESUMED[case].items()}
    if case == "disk":
        sections["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    settings = config(stage, precision={"state_dtype": state_dtype}, **sections)
    for saved, loaded, on, continued in ranks(2, resume, settings, settings, tmp_path / "saved"):
        assert is_equal(saved, loaded)
        assert is_equal(on[0], continued[0])
        assert is_equal(on[1], continued[1])


def test_state_is_loaded_in_another_layout_and_from_another_format(ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Only blocks that the edge of a shard cuts are rounded again."""

    def save() -> dict[str, torch.Tensor]:
        engine = start(Plain, config(3, precision={"state_dtype": "int8"}), adamw)
        run_steps(engine, 2)
        engine.save_checkpoint(tmp_path)
        return whole_state(engine)

    def load(stage: int, state_dtype: str) -> dict[str, torch.Tensor]:
        engine = start(Plain, config(stage, precision={"state_dtype": state_dtype}), adamw)
        engine.load_checkpoint(tmp_path)
        return whole_state(engine)

    def whole_state(engine: shoal.Engine) -> dict[str, torch.Tensor]:
        found = {}
        for name, p in engine.module.named_parameters():
            value = engine.access.full_optimizer_state(p, "exp_avg")
            if value is not None:
                found[name] = value.clone()
        return found

    saved = ranks(2, save)[0]
    for state_dtype, bound in (("fp32", 0.0), ("int8", 0.01), ("fp8", 1 / 16)):
        for loaded in ranks(4, load, 1, state_dtype):
            assert loaded.keys() == saved.keys()
            for name, value in saved.items():
                assert float((loaded[name] - value).abs().max()) <= bound * float(value.abs().max())


def test_state_has_a_byte_for_each_element_and_two_for_each_block(ranks: Callable[..., Any], tmp_path: Path) -> None:
    """In the ledger, on each tier; and the bytes that a disk reads and writes in a step."""

    def model() -> Plain:
        made = Plain(2, 128)
        del made.unused  # which has no state
        return made

    def run(state_dtype: str, kind: str) -> tuple[int, int, int]:
        section = {"zero_optimization": {"offload_optimizer": {"device": kind, "nvme_path": str(tmp_path)}}}
        settings = config(2, precision={"state_dtype": state_dtype}, **(section if kind != "none" else {}))
        engine = start(model, settings, adamw)
        run_steps(engine, 1)
        moved.clear()
        run_steps(engine, 1, first=1)
        ledger = engine.memory_report()
        assert all(entry.nbytes == entry.formula for entry in ledger.entries)
        numel = sum(part.stop - part.start for group in engine.sharded.groups for part in group.ranges)
        engine.destroy()
        return ledger.by_kind()["optimizer state"], numel, sum(moved)

    moved: list[int] = []
    submit = DiskTier._submit

    def counted(disk: DiskTier, extent: Any, tensor: torch.Tensor, offset: int = 0, *, is_write: bool) -> Any:
        moved.append(tensor.nbytes)
        return submit(disk, extent, tensor, offset, is_write=is_write)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskTier, "_submit", counted)
        for kind in ("none", "cpu", "nvme"):
            (plain, numel, plain_moved), (found, _, found_moved) = (
                ranks(2, run, each, kind)[0] for each in ("fp32", "int8")
            )
            assert plain == 8 * numel
            assert 2 * numel < found < 2 * numel * (1 + 3 / BLOCK)
            if kind == "nvme":  # main parameters are there too: 12 bytes for each element, or 6
                assert plain_moved >= 2 * 12 * numel
                assert found_moved < 0.53 * plain_moved


# bf16 main parameters that are rounded stochastically

ALONE = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
ROUNDED = {**ALONE, "precision": {"stochastic_rounding": True}}


def test_stochastic_rounding_has_the_value_as_its_mean_and_rounds_each_parameter_alike_in_every_range() -> None:
    specs = [ParameterSpec.whole("one", (60_000,)), ParameterSpec.whole("other", (40_000,))]
    values = torch.full((100_000,), 1 + 1 / 512)
    values[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])

    def rounded(segments: list[Segment], step: int = 0) -> torch.Tensor:
        result = torch.zeros(100_000, dtype=torch.bfloat16)
        round_stochastically(values, result, segments, specs, step)
        return result

    whole = rounded([Segment(0, 0, 60_000, 0), Segment(1, 60_000, 100_000, 0)])
    finite = whole[3:].float()
    assert torch.equal(whole[:3], values[:3].bfloat16()) or whole[2].isnan()
    assert set(finite.unique().tolist()) == {1.0, 1 + 1 / 128}
    assert abs(float(finite.mean()) - (1 + 1 / 512)) < 4 * (1 / 128) * (0.25 * 0.75 / 100_000) ** 0.5
    cut = rounded([Segment(0, 0, 777, 0), Segment(0, 777, 60_000, 777), Segment(1, 60_000, 100_000, 0)])
    assert torch.equal(cut[3:], whole[3:])
    assert not torch.equal(rounded([Segment(0, 0, 60_000, 0)], 1)[3:60_000], whole[3:60_000])


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_stochastically_rounded_parameters_are_those_of_every_stage_and_of_a_resumed_run(
    state_dtype: str, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    sections = {**ROUNDED, "precision": {**ROUNDED["precision"], "state_dtype": state_dtype}}
    found = []
    for stage in (1, 2, 3):
        settings = config(stage, **sections)
        results = ranks(2, resume, settings, settings, tmp_path / str(stage))
        for _, _, on, continued in results:
            assert is_equal(on[0], continued[0])
            assert is_equal(on[0], results[0][2][0])
        found.append(results[0][2][0])
    assert is_equal(found[0], found[1])
    assert is_equal(found[0], found[2])
    nearest = config(1, **ALONE, precision={"state_dtype": state_dtype})
    (plain,) = {id(each[2][0]): each[2][0] for each in ranks(1, resume, nearest, nearest, tmp_path / "n")}.values()
    assert not all(torch.equal(value, found[0][name]) for name, value in plain.items())


@pytest.mark.parametrize(
    "layout", [{"pp": "2", "stage": "1"}, {"tp": "2", "stage": "0"}, {"ranks": "4", "hybrid": "replicas", "stage": "3"}]
)
def test_ranks_that_hold_the_same_parameter_round_it_alike(layout: dict[str, str]) -> None:
    """Weights that two pipeline stages tie, norms of tensor-parallel ranks, replicas."""
    plain = {axis: next(iter(values)) for axis, values in AXES.items()}
    settings, run = settings_of({**plain, "precision": "bf16 alone", **layout})
    settings["precision"] = {"stochastic_rounding": True}
    values: dict[str, torch.Tensor] = {}
    for _, found in composition_runs.train(settings, run):
        for name, value in found.items():
            assert torch.equal(values.setdefault(name, value), value), name


def test_updates_below_half_of_the_last_bit_are_lost_unless_they_are_rounded_stochastically(
    ranks: Callable[..., Any],
) -> None:
    """A weight of 1 with 200 updates of 1/2048 each, an eighth of bf16's last bit below 1."""

    def train(sections: dict[str, Any]) -> float:
        model = torch.nn.Linear(64, 64, bias=False)
        torch.nn.init.ones_(model.weight)
        settings = {"train_micro_batch_size_per_gpu": 64, "gradient_clipping": 0.0, **sections}
        settings["optimizer"] = {"type": "SGD", "params": {"lr": 1 / 2048}}
        engine = shoal.initialize(model=model, config=settings)[0]
        for _ in range(200):
            engine.backward(engine(torch.eye(64, dtype=torch.bfloat16)).float().sum())
            engine.step()
        return float(engine.module.weight.detach().float().mean())

    assert ranks(1, train, ALONE) == [1.0]
    assert abs(ranks(1, train, ROUNDED)[0] - (1 - 200 / 2048)) < 1e-3


@pytest.mark.parametrize(
    ("sections", "code"),
    [
        ({"precision": {"stochastic_rounding": True}, "bf16": {"enabled": True}}, "main parameters are not bf16"),
        ({"precision": {"state_dtype": "int8"}, "optimizer": {"type": "Muon"}}, "Muon steps whole tensors"),
        ({**ROUNDED, "optimizer": {"type": "Lamb"}}, "Lamb steps whole tensors"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
            | {"precision": {"state_dtype": "int8"}},
            "bf16_optimizer_states is true",
        ),
    ],
)
def test_what_does_not_fit_is_named(sections: dict[str, Any], code: str, ranks: Callable[..., Any]) -> None:
    with pytest.raises(shoal.ShoalError, match=code):
        ranks(1, lambda: shoal.initialize(model=make(Plain), config=config(1, **sections)))
