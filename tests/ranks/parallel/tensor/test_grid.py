"""Tensor parallelism over a grid of ranks (2-D, 2.5-D, 3-D): parity, bytes by formula, what is refused."""

from __future__ import annotations

import copy
import doctest
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal.parallel.tensor.grid
from shoal.comm.recorder import Entry
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world, use_world
from shoal.errors import ConfigError, ModelError, UsageError
from shoal.mesh import Mesh
from shoal.models.gpt import GPT, Block, GPTConfig, rotations
from shoal.parallel.tensor import parallelize
from shoal.parallel.tensor.grid import Grid, GridKind, LayerShape, TensorParallelKind, grid_shape, layer_cost
from shoal.parallel.tensor.grid_apply import parallelize_grid
from shoal.sharding.parts import cut, gather_parts
from tests.helpers.tensor_cases import difference, randomize, tp_communicator
from tests.ranks.comm.test_processes import own_world
from tests.ranks.parallel.tensor.test_shared_heads import FUSED
from tests.ranks.parallel.tensor.test_shared_heads import Layers as SharedHeads
from tests.ranks.parallel.tensor.test_shared_heads import forward as of_heads

Gloo = Callable[..., list[Any]]

GRIDS: list[tuple[GridKind, int]] = [("2d", 4), ("2.5d", 8), ("3d", 8)]
BATCH, LENGTH, HIDDEN = 4, 6, 64
GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randint(0, 31, (BATCH, LENGTH), generator=GENERATOR)
INPUT = torch.randn(BATCH, LENGTH, HIDDEN, generator=GENERATOR)
PLAN = {"up": "column", "down": "row"}


def open_grid(kind: GridKind) -> Grid:
    world = current_world()
    return Grid.open(world, Mesh.of(world.size, tp=world.size), kind)


class Mlp(nn.Module):
    """A LayerNorm and two linears, all with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.down = nn.Linear(3 * HIDDEN, HIDDEN)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = input + self.down(F.gelu(self.up(self.norm(input))))
        return out


class LlamaAttention(nn.Module):
    """Grouped-query attention by separate projections; the names of Transformers' Llama."""

    def __init__(self, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = 8, num_kv_heads, HIDDEN // 8
        kv_numel = num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, kv_numel, bias=False)  # its gradient would be zero but for rounding
        self.v_proj = nn.Linear(HIDDEN, kv_numel)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        projected = (each(hidden) for each in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class LlamaLayer(nn.Module):
    """A block with RMSNorms, and gate and up in one linear."""

    def __init__(self, num_kv_heads: int) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.self_attn = LlamaAttention(num_kv_heads)
        self.mlp_norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.gate_up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_norm(hidden), mask)
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, -1)
        out: torch.Tensor = hidden + self.down(F.silu(gate) * up)
        return out


class Layers(nn.Module):
    """Layers with a mask that differs between samples."""

    def __init__(self, num_layers: int, num_kv_heads: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaLayer(num_kv_heads) for _ in range(num_layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(LENGTH)[None, None, None] <= torch.arange(BATCH)[:, None, None, None]
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden


LLAMA_PLAN = {
    **{f"self_attn.{name}_proj": "column" for name in "qkv"},
    "self_attn.o_proj": "row",
    "gate_up": "column:2",
    "down": "row",
}


def compare(
    kind: GridKind,
    size: int,
    model: nn.Module,
    forward: Callable[[nn.Module, Grid | None], torch.Tensor],
    plan: Mapping[str, str] | None = None,
) -> list[list[Entry]]:
    """Compare the output and every gradient on a grid with those of the whole model, relative to their norms."""
    limit = 1e-12 if next(model.parameters()).dtype == torch.float64 else 1e-6
    copies = [copy.deepcopy(model) for _ in range(size)]
    expected = forward(model, None)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(expected)
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}

    def on_a_rank() -> list[Entry]:
        grid = open_grid(kind)
        mine = copies[grid.rank]
        local = parallelize_grid(mine, grid, plan)
        with current_world().recorder.recording() as entries:
            output = forward(mine, grid)
            (output * weights).sum().backward()
        assert difference(output, expected) < limit
        for name, parameter in mine.named_parameters():
            want = gradients[name]
            assert want is not None and parameter.grad is not None, name
            allowed = limit * float(want.norm())  # of the whole gradient
            want = cut(want, local[name]) if name in local else want
            assert parameter.shape == parameter.grad.shape == want.shape, name
            assert float((parameter.grad - want).norm()) <= allowed, name
        return list(entries)

    results: list[list[Entry]] = run_ranks(size, on_a_rank)
    return results


def of_a_block(model: nn.Module, grid: Grid | None) -> torch.Tensor:
    out: torch.Tensor = model(INPUT) if grid is None else grid.gather(model(grid.split(INPUT)))
    return out


def whole(model: nn.Module, grid: Grid | None) -> torch.Tensor:
    out: torch.Tensor = model(INPUT.to(next(model.parameters()).dtype))
    return out


def test_the_examples_in_the_docstrings_hold() -> None:
    result = doctest.testmod(shoal.parallel.tensor.grid)
    assert (result.attempted, result.failed) == (1, 0)


@pytest.mark.parametrize(("kind", "size"), GRIDS)
def test_two_linears_and_a_norm_compute_what_one_rank_does(kind: GridKind, size: int) -> None:
    compare(kind, size, randomize(Mlp()), of_a_block, PLAN)


@pytest.mark.parametrize("is_autocast", [False, True])
def test_the_lower_precision_of_the_model_or_of_autocast_is_that_of_products_and_bytes(is_autocast: bool) -> None:
    model = randomize(Mlp())
    copies = [copy.deepcopy(model) for _ in range(8)]
    model(INPUT).sum().backward()

    def on_a_rank() -> None:
        grid = open_grid("2.5d")
        mine = copies[grid.rank]
        local = parallelize_grid(mine, grid, PLAN)
        mine = mine if is_autocast else mine.bfloat16()
        own = grid.split(INPUT if is_autocast else INPUT.bfloat16())
        with current_world().recorder.recording() as entries:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                output = mine(own)
            output.float().sum().backward()
        linear = {entry.dtype for entry in entries if entry.label.startswith(("up", "down"))}
        assert linear == {torch.bfloat16}
        for name, parameter in mine.named_parameters():
            whole = model.get_parameter(name).grad
            assert parameter.grad is not None and whole is not None
            assert difference(parameter.grad, cut(whole, local[name]), float(whole.abs().max())) < 0.03, name

    run_ranks(8, on_a_rank)


@pytest.mark.parametrize(("num_layers", "dtype"), [(1, torch.float32), (2, torch.float64)])
@pytest.mark.parametrize(("kind", "size"), GRIDS)
def test_a_model_with_fused_heads_computes_what_one_rank_does(
    kind: GridKind, size: int, num_layers: int, dtype: torch.dtype
) -> None:
    model = randomize(GPT(GPTConfig(31, LENGTH, num_layers, HIDDEN, 4))).to(dtype)
    compare(kind, size, model, lambda model, _: model(TOKENS))


@pytest.mark.parametrize(("num_layers", "dtype"), [(1, torch.float32), (2, torch.float64)])
@pytest.mark.parametrize(("kind", "size"), GRIDS)
def test_grouped_heads_and_a_mask_of_each_sample_compute_what_one_rank_does(
    kind: GridKind, size: int, num_layers: int, dtype: torch.dtype
) -> None:
    compare(kind, size, randomize(Layers(num_layers)).to(dtype), whole, LLAMA_PLAN)


@pytest.mark.parametrize(("kind", "size"), GRIDS)
def test_key_value_heads_that_ranks_share_compute_what_one_rank_does(kind: GridKind, size: int) -> None:
    for calls in compare(kind, size, randomize(Layers(1, num_kv_heads=1)), whole, LLAMA_PLAN):
        shared = [call for call in calls if "shared heads" in call.label]
        assert Counter(call.op for call in shared) == {"all_gather": 2, "reduce_scatter": 2}  # of keys and of values
    if kind != "3d":  # of which the batch does not divide
        compare(kind, size, randomize(SharedHeads(8, 1, True)), lambda model, _: of_heads(model)["loss"], FUSED)


@pytest.mark.parametrize(("kind", "size"), GRIDS)
def test_embedding_and_head_are_split_over_all_ranks(kind: GridKind, size: int) -> None:
    """Of 32 tokens each rank holds an equal part; nothing but the last norm is whole."""
    model = randomize(GPT(GPTConfig(32, LENGTH, 1, HIDDEN, 4, tied=False)))
    copies = [copy.deepcopy(model) for _ in range(size)]

    def on_a_rank() -> None:
        grid = open_grid(kind)
        mine = copies[grid.rank]
        local = parallelize_grid(mine, grid)
        whole = [name for name, _ in model.named_parameters() if name not in local]
        assert whole == ["norm.weight"]
        held = sum(parameter.numel() for name, parameter in mine.named_parameters() if name in local)
        assert held * size == sum(parameter.numel() for name, parameter in model.named_parameters() if name in local)

    run_ranks(size, on_a_rank)


class OneBlock(nn.Module):
    """One block of a GPT."""

    def __init__(self, hidden: int, length: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(GPTConfig(1, length, 1, hidden, 8))])
        self.cos, self.sin = rotations(torch.arange(length), hidden // 8, torch.float32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks[0](hidden, self.cos, self.sin)
        return out


@pytest.mark.parametrize(("kind", "size"), [*GRIDS, ("1d", 4), ("1d-sequence", 4)])
def test_a_layer_receives_and_keeps_the_bytes_of_the_formula(kind: TensorParallelKind, size: int) -> None:
    hidden, length = 256, 16
    cost = layer_cost(kind, size, LayerShape(BATCH * length, hidden, 4 * hidden))

    def on_a_rank() -> None:
        mine = OneBlock(hidden, length)
        if kind == "1d" or kind == "1d-sequence":
            parallelize(mine, tp_communicator(), sequence_parallel=kind == "1d-sequence")
        else:
            parallelize_grid(mine, open_grid(kind))
        not_kept = {tensor.untyped_storage().data_ptr() for tensor in (*mine.parameters(), mine.cos, mine.sin)}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in not_kept:
                kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with current_world().recorder.recording() as entries:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                output = mine(torch.randn(BATCH, length, hidden).requires_grad_())
            output.sum().backward()
        inside = [entry for entry in entries if entry.label.startswith("blocks.")]
        assert sum(entry.nbytes for entry in inside) == cost.received
        assert sum(parameter.nbytes for parameter in mine.parameters()) == cost.weights
        assert sum(kept.values()) == pytest.approx(cost.activations, rel=0.02)
        if not kind.startswith("1d"):
            calls = Counter(entry.op for entry in inside if entry.label.startswith("blocks.0.attention.qkv"))
            sums = 2 if kind == "2d" else 3  # in 2-D nothing is summed after the product
            assert calls == {"all_gather": sums + 2, "reduce_scatter": sums}

    run_ranks(size, on_a_rank)


@pytest.mark.parametrize(("kind", "size"), GRIDS)
def test_the_parts_of_all_ranks_are_disjoint_and_cover_every_parameter(kind: GridKind, size: int) -> None:
    model = Layers(1)
    copies = [copy.deepcopy(model) for _ in range(size)]

    def on_a_rank() -> None:
        comm, grid = tp_communicator(), open_grid(kind)
        mine = copies[comm.rank]
        assert grid.rank == comm.rank
        local = parallelize_grid(mine, grid, LLAMA_PLAN)
        parameters = dict(mine.named_parameters())
        assert local.keys() == parameters.keys()
        for name, parameter in model.named_parameters():  # a sum, so that what two ranks hold would count twice
            assert local[name].numel * size == parameter.numel()
            assert torch.equal(gather_parts(parameters[name].data, local[name], comm), parameter)

    run_ranks(size, on_a_rank)


def _on_processes(rank: int, size: int, shared_memory: bool) -> list[Any]:
    world = own_world(rank, size, "grid", shared_memory)
    with use_world(world):
        torch.manual_seed(5)
        whole = randomize(GPT(GPTConfig(31, LENGTH, 1, HIDDEN, 4, dropout=0.5)))
        mine = copy.deepcopy(whole)
        parallelize_grid(mine, open_grid("2d"))
        drawn: list[float] = []
        for name in ("blocks.0.feed_forward", "norm"):
            mine.get_submodule(name).register_forward_hook(lambda *_: drawn.append(torch.rand(()).item()))
        mine(TOKENS)
        difference_of_eval = difference(mine.eval()(TOKENS), whole.eval()(TOKENS))
    world.close()
    return [difference_of_eval, *drawn[:2]]


@pytest.mark.gloo
@pytest.mark.parametrize("shared_memory", [True, False])
def test_processes_compute_what_one_does_and_drop_other_elements_on_every_rank(gloo: Gloo, shared_memory: bool) -> None:
    differences, inside, outside = zip(*gloo(4, _on_processes, shared_memory), strict=True)
    assert max(differences) < 1e-6
    assert len(set(inside)) == 4
    assert len(set(outside)) == 1


def test_sizes_that_are_no_grid_name_the_nearest() -> None:
    for kind, size, near in (("2d", 8, "4 or 9"), ("2.5d", 6, "4 or 8"), ("3d", 4, "to 8"), ("2d", 1, "to 4")):
        with pytest.raises(ConfigError, match=f"set tp to .*{near}" if " or " in near else f"set tp {near}"):
            grid_shape(kind, size)  # type: ignore[arg-type]
    assert [grid_shape("2.5d", size) for size in (4, 8, 16, 32)] == [(2, 2, 1), (2, 2, 2), (4, 4, 1), (4, 4, 2)]


def test_what_the_grid_cannot_split_is_refused_before_anything_is_changed() -> None:
    wide, odd_heads = Mlp(), randomize(GPT(GPTConfig(31, LENGTH, 1, 48, 3)))
    wide.up, wide.down = nn.Linear(HIDDEN, 100), nn.Linear(100, HIDDEN)
    extra = Mlp()
    extra.scale = nn.Parameter(torch.ones(HIDDEN))
    cases: list[tuple[nn.Module, dict[str, str] | None, str]] = [
        (wide, PLAN, "up cannot be split .* its 100 outputs do not divide by 8"),
        (odd_heads, None, "3 attention heads.* do not divide over 2 ranks"),
        (extra, PLAN, "scale cannot be split"),
        (Mlp(), {"up": "column"}, "down.weight cannot be split"),
    ]

    def on_a_rank() -> None:
        grid = open_grid("3d")
        for model, plan, message in cases:
            before = [(type(module), id(module)) for module in model.modules()]
            with pytest.raises(ModelError, match=message):
                parallelize_grid(model, grid, plan)
            assert [(type(module), id(module)) for module in model.modules()] == before
        with pytest.raises(UsageError, match=r"dim 0 .* does not divide by 4.*(?s:.)*pad it by 2"):
            grid.split(INPUT[:2])

    run_ranks(8, on_a_rank)
