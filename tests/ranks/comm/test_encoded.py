"""Activations sent in a format, against one process that encodes where ranks would send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.comm import autograd
from shoal.comm.encoded import Encoded
from shoal.comm.formats import Int8, WireFormat, format_named
from shoal.comm.threads import run_ranks
from shoal.comm.wire import RowBytes
from shoal.comm.world import current_world
from shoal.errors import ConfigError
from shoal.mesh import Mesh, factor_axis
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.held import ExpertsHeld
from shoal.parallel.sequence.ulysses import HeadExchange, split_heads
from tests.helpers.expert_dispatch_cases import DispatchCase
from tests.helpers.pipeline_layers import NUM_LAYERS, STEPS, batches, engine_of, layers
from tests.helpers.training import make, sgd

FORMATS = ["int8", "fp8", "int4_hadamard", "bf16"]


def through(form: WireFormat, rows: Tensor) -> Tensor:
    """What arrives of rows that are encoded each by itself."""
    out = torch.empty_like(rows)
    form.decode(form.encode(rows), out)
    return out


class Coded(torch.autograd.Function):
    """What arrives of rows along the last dim, forward and backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, form: WireFormat) -> Tensor:
        ctx.form = form
        return through(form, values.reshape(-1, values.shape[-1])).view(values.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return through(ctx.form, gradient.reshape(-1, gradient.shape[-1])).view(gradient.shape), None


# Rows.


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_as_bytes_decode_to_what_each_row_alone_decodes_to(name: str, dtype: torch.dtype) -> None:
    form, empty = format_named(name, 64), lambda numel, dtype, device: torch.empty(numel, dtype=dtype)
    for width in (5, 64, 150):
        coded = RowBytes(form, width, dtype, torch.device("cpu"))
        for num_rows in (0, 1, 7):
            rows = torch.randn(num_rows, width).to(dtype)
            message = coded.encode(rows, empty)
            assert message.shape == (num_rows, coded.nbytes) and message.dtype == torch.uint8
            order = torch.randperm(num_rows)
            out = torch.empty_like(rows)
            coded.decode(message[order].contiguous(), out)
            for at, source in enumerate(order.tolist()):
                alone = through(form, rows[source : source + 1])[0]
                if name == "int4_hadamard":  # a matrix product of other shapes rounds otherwise
                    torch.testing.assert_close(out[at], alone, rtol=1e-2, atol=1e-6)
                else:
                    assert torch.equal(out[at], alone)


# Experts.


def compute(scales: Tensor) -> Callable[[Tensor, Sequence[int]], Tensor]:
    """Experts whose result for a row does not depend on the rows with it."""
    return lambda rows, counts: rows.tanh() * scales.repeat_interleave(torch.tensor(counts), 0)


def experts_alone(form: WireFormat, case: DispatchCase) -> dict[str, Tensor]:
    hidden, weights = torch.cat(case.hidden).requires_grad_(), torch.cat(case.weights).requires_grad_()
    scales, index = case.outer[:, 0].clone().requires_grad_(), torch.cat(case.index)
    rows = Coded.apply(hidden[:, None].expand(-1, case.k, -1), form)
    outputs = Coded.apply(rows.tanh() * scales[index.clamp(min=0)], form)
    output = (outputs * (weights * (index >= 0))[..., None]).sum(1)
    output.backward(torch.cat(case.gradient))
    values = {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad, "outer": scales.grad}
    return {name: value for name, value in values.items() if value is not None}


def with_experts(form: WireFormat, overlap: int = 1, axes: Any = None) -> Callable[..., Any]:
    def run(case: DispatchCase, held: ExpertsHeld, experts: list[Tensor], *given: Tensor) -> dict[str, Tensor]:
        hidden, weights, gradient, index = given
        held.wire = form
        if axes is not None:
            held.comm, *both = axes()
            held.hierarchy = both[0], both[1]
        scales = experts[1].detach()[:, 0].clone().requires_grad_()
        hidden.requires_grad_(), weights.requires_grad_()
        with current_world().recorder.recording() as entries:
            output = run_experts(hidden, index, weights, compute(scales), held, overlap=overlap)
            output.backward(gradient)
        if axes is None and overlap == 1:
            sent = [entry.nbytes for entry in entries if entry.kind == "data"]
            owners = torch.tensor(held.owners)
            of_all = [(torch.where(each >= 0, owners[each], -1), rank) for rank, each in enumerate(case.index)]
            size, mine = held.ep_size, held.comm.rank if held.comm is not None else 0
            come = sum(int((to == mine).sum()) for to, rank in of_all if rank * size // 4 != mine)
            back = sum(int(((to >= 0) & (to != mine)).sum()) for to, rank in of_all if rank * size // 4 == mine)
            assert sent == [rows * (32 + 16) for rows in (come, back, come, back)]  # codes of a row, and its scale
        values = {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad}
        values |= {"inner": torch.zeros(len(held.ids)), "outer": scales.grad}
        return values  # type: ignore[return-value]

    return run


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("overlap", [1, 3])
def test_rows_of_experts_give_what_one_process_gives_that_encodes_each(ep: int, overlap: int) -> None:
    case, form = DispatchCase(), Int8()
    found, wanted = case.found(ep, with_experts(form, overlap)), experts_alone(form, case)
    for name, value in wanted.items():  # sums of what arrives, in another order; a step of int8 is 1e-2
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_rows_sent_in_two_steps_are_encoded_once() -> None:
    def two_axes() -> Any:
        world, mesh = current_world(), Mesh.of(4)
        return world.communicator("dp_shard", mesh), *(
            world.communicator(factor_axis("dp_shard", (2, 2), (at,)), mesh) for at in (1, 0)
        )

    case, form = DispatchCase(), format_named("int4")
    at_once, in_two = case.found(4, with_experts(form, 2)), case.found(4, with_experts(form, 1, two_axes))
    for name in ("output", "hidden", "weights"):
        assert torch.equal(at_once[name], in_two[name]), name


def test_a_token_that_is_not_a_number_stays_one_and_leaves_the_others() -> None:
    case = DispatchCase()
    case.hidden[1][2, 3] = torch.nan
    case.index[1][2] = torch.tensor([0, 7])
    output = case.found(4, with_experts(Int8()))["output"]
    assert output.isnan().any(1).nonzero().flatten().tolist() == [len(case.hidden[0]) + 2]


# Tensor-parallel layers.


def dp() -> Any:
    return current_world().communicator("dp", Mesh.of(current_world().size))


def summed(parts: Sequence[Tensor], form: WireFormat) -> Tensor:
    """An all-reduce in a format."""
    size = len(parts)
    rows = [nn.functional.pad(part.flatten(), (0, -part.numel() % size)).view(size, -1) for part in parts]
    total = torch.stack([through(form, each) for each in rows]).double().sum(0).float()
    return through(form, total).flatten()[: parts[0].numel()].view(parts[0].shape)


@pytest.mark.parametrize("name", FORMATS)
def test_split_layers_have_the_bits_of_one_process_that_encodes_their_sums(name: str) -> None:
    form, generator = format_named(name, 64), torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(*shape, generator=generator) for shape in ((3, 5, 7), (8, 7), (7, 8)))
    gradient = torch.randn(3, 5, 7, generator=generator)

    def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, up).tanh(), down)

    def run() -> tuple[Tensor, Tensor | None, list[int]]:
        comm = Encoded(dp(), form)
        own, leaf = slice(4 * comm.rank, 4 * comm.rank + 4), x.clone().requires_grad_()
        with current_world().recorder.recording() as entries:
            out = autograd.all_reduce(
                layer(autograd.copy(leaf, comm, label="in"), up[own], down[:, own]), comm, label="out"
            )
            out.backward(gradient)
        return out.detach(), leaf.grad, [entry.nbytes for entry in entries if entry.kind == "data"]

    parts, gradients = [], []
    for own in (slice(0, 4), slice(4, 8)):
        leaf = x.clone().requires_grad_()
        parts.append(layer(leaf, up[own], down[:, own]))
        parts[-1].backward(gradient)
        gradients.append(leaf.grad)
    row = {"bf16": 112, "int8": 64 + 16, "fp8": 64 + 16, "int4_hadamard": 32 + 16}[name]  # 53 elements
    for out, of_x, nbytes in run_ranks(2, run):
        assert torch.equal(out, summed([part.detach() for part in parts], form))
        assert of_x is not None and torch.equal(of_x, summed([each for each in gradients if each is not None], form))
        assert nbytes == [row] * 4  # an all-to-all and an all-gather, forward and backward


@pytest.mark.parametrize("name", ["int8", "bf16"])
def test_a_split_sequence_is_gathered_and_scattered_in_the_format(name: str) -> None:
    form = format_named(name, 32)
    x, gradient = (torch.randn(2, 4, 10, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))

    def run() -> tuple[Tensor, Tensor | None]:
        comm = Encoded(dp(), form)
        leaf = x.chunk(2, 1)[comm.rank].clone().requires_grad_()
        whole = autograd.all_gather(leaf, comm, dim=1, label="in")
        whole.backward(gradient * (comm.rank + 1))
        return whole.detach(), leaf.grad

    results = run_ranks(2, run)
    wanted = torch.cat([through(form, part.reshape(1, -1)).view(part.shape) for part in x.chunk(2, 1)], 1)
    for rank, (whole, of_part) in enumerate(results):
        assert torch.equal(whole, wanted)
        sent = [(gradient * factor).chunk(2, 1)[rank] for factor in (1, 2)]
        total = sum(through(form, part.reshape(1, -1)).view(part.shape) for part in sent)
        assert of_part is not None and torch.equal(of_part, total)


def test_integers_are_sent_as_they_are_and_what_is_not_finite_is_seen_by_all() -> None:
    def run() -> None:
        comm = Encoded(dp(), Int8())
        numbers = torch.arange(6) + 1000 * comm.rank
        assert autograd.gather(numbers, comm, label="numbers").tolist() == [*range(6), *range(1000, 1006)]
        values = torch.ones(600)
        values[300] = torch.inf if comm.rank else 1.0
        out = autograd.all_reduce(values, comm, label="values")
        assert out[300].isnan() and out[0] == 2

    run_ranks(2, run)


# Ulysses.


@pytest.mark.parametrize("name", ["int8", "int4_hadamard"])
def test_heads_are_sent_by_position_in_the_format(name: str) -> None:
    form, lengths, split = format_named(name), (3, 2), split_heads(3, 1, 2)
    query, key = (torch.randn(2, heads, 5, 8, generator=torch.Generator().manual_seed(heads)) for heads in (3, 1))
    arrived = [through(form, each.reshape(-1, 8)).view(each.shape) for each in (query, key)]

    def run() -> None:
        comm = dp()
        mine = [each.split(list(lengths), 2)[comm.rank].clone().requires_grad_() for each in (query, key)]
        exchange = HeadExchange(comm, lengths, wire=form)
        heads = exchange.to_heads(mine, (split.queries, split.keys), "heads")
        for found, whole, of in zip(heads, arrived, (split.queries, split.keys), strict=True):
            part = of[comm.rank]
            assert torch.equal(found, whole[:, part.start : part.stop])
        back = exchange.to_positions(heads[0], split.queries, "positions")
        twice = through(form, arrived[0].reshape(-1, 8)).view(query.shape)
        assert torch.equal(back, twice.split(list(lengths), 2)[comm.rank])
        back.sum().backward()
        assert mine[0].grad is not None and torch.allclose(mine[0].grad, torch.ones(()), atol=0.2)

    run_ranks(2, run)


# Pipelines.


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_messages_of_a_pipeline_have_the_bits_of_one_process_that_encodes_them(schedule: str) -> None:
    form, num_micro = Int8(), 2

    def job() -> Any:
        engine = engine_of(1, 2, num_micro, schedule, 1, tied=False, gradient_clipping=0.0, wire={"pipeline": "int8"})
        with current_world().recorder.recording() as entries:
            losses = [float(engine.train_batch(batches(0, step, num_micro))) for step in range(STEPS)]
        sent = {entry.nbytes for entry in entries if entry.op == "recv" and "structure" not in str(entry.label)}
        return losses, engine.module_state_dict(), sent

    model = layers(tied=False)
    optimizer = sgd([parameter for layer in model for parameter in layer.parameters()])
    wanted = []
    for step in range(STEPS):
        total = 0.0
        for inputs, labels in batches(0, step, num_micro):
            value = inputs
            for index, layer in enumerate(model):
                value = Coded.apply(value, form) if index == NUM_LAYERS // 2 else value
                value = layer(value)
            loss = nn.functional.mse_loss(value, labels) / num_micro
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(total)
    values = {f"{at}.{name}": value for at, layer in enumerate(model) for name, value in layer.state_dict().items()}
    for losses, found, sent in run_ranks(2, job):
        assert losses == pytest.approx(wanted, rel=1e-6)
        assert sent == {2 * (32 + 16)}  # two rows of 6 elements: their codes and scales
        for name, value in found.items():
            torch.testing.assert_close(value, values[name], rtol=1e-6, atol=1e-6, msg=name)


# From the configuration.


def gpt() -> GPT:
    return GPT(GPTConfig(50, 8, 2, 32, 4, True))


def losses(more: dict[str, Any], steps: int = 4) -> tuple[list[float], list[str]]:
    model = make(gpt)
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, **more}
    engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]
    found, ops = [], []
    for step in range(steps):
        tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(step))
        with current_world().recorder.recording() as entries:
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
        ops = [entry.op for entry in entries if entry.axis == "tp" and entry.dtype == torch.uint8]
    return found, ops


@pytest.mark.parametrize("more", [{}, {"tp_sequence_parallel": True}, {"tensor_parallel": {"tp_overlap_comm": True}}])
def test_a_tensor_parallel_model_trains_close_to_the_one_without_formats(more: dict[str, Any]) -> None:
    overlap = {key: more[key] for key in ("tensor_parallel",) if key in more}
    sections = {"parallel": {"tp": 2, **{k: v for k, v in more.items() if k not in overlap}}, **overlap}
    plain, coded = (run_ranks(2, losses, {**sections, **wire}) for wire in ({}, {"wire": {"tensor": "int8"}}))
    assert not plain[0][1] and {"all_to_all", "all_gather"} <= set(coded[0][1])
    assert coded[0][0] == coded[1][0] and coded[0][0] != plain[0][0]
    assert coded[0][0] == pytest.approx(plain[0][0], rel=0.02)


def test_formats_along_axes_of_one_rank_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="shoal")
    run_ranks(2, losses, {"wire": {"experts": "int8", "tensor": "bf16"}}, 1)
    assert "wire.experts = int8: accepted, no effect: there is one rank along ep." in caplog.text
    assert "wire.tensor = bf16: accepted, no effect: there is one rank along tp." in caplog.text


def test_a_grid_of_tensor_parallel_ranks_has_no_format() -> None:
    with pytest.raises(ConfigError, match=r"wire\.tensor"):
        run_ranks(4, losses, {"parallel": {"tp": 4, "tp_grid": "2d"}, "wire": {"tensor": "int8"}}, 1)
