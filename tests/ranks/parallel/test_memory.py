"""Bytes that a rank holds under tensor and sequence parallelism equal their formulas, within 2 %.

State: ZeRO (arXiv:1910.02054), section 3, of the Psi parameters that a tensor parallel rank has. With 16-bit parameters
and gradients and K = 12 bytes of fp32 main parameter and Adam's state, N data parallel ranks:

    stage 0    (2 + 2 + K) Psi          stage 2    2 Psi + (2 + K) Psi / N
    stage 1    4 Psi + K Psi / N        stage 3    (4 + K) Psi / N

Activations: Korthikanti et al. (arXiv:2205.05198), section 4. With s positions, b rows, width h, a heads and t ranks a
layer keeps, in bytes of 16-bit elements, with one byte for each element of a dropout mask:

                            whole on every rank                              split
    norms' inputs, theirs   4 sbh, 2 x 2 sbh of what qkv and up multiply
    masks behind a row      2 sbh
    attention                                                                8 sbh / t, 5 a s^2 b / t of scores
    feed-forward                                                             16 sbh / t
    table 2                 sbh (10 + 24 / t + 5 a s / (h t)); sequence parallel sbh / t (34 + 5 a s / h)

The layer measured is a block of Shoal's GPT. Per element: norms' inputs 2, inputs of qkv and up 2, query, key, value
and attention's output 4, input and output of GELU 8: (4 + 12 / t) sbh; sequence parallel 16 sbh / t. Torch's dropout
on CPU keeps its mask in the dtype of activations: 2 sbh more. The fused kernel keeps no scores, but a log-sum-exp for
each position and head; attention in plain operations keeps the softmax, a s^2 b / t, without a mask or a dropped copy
of it. A norm keeps a mean and a deviation for each position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.models.gpt import GPT, Block, GPTConfig, rotations
from shoal.parallel.sequence.context import SequenceContext
from shoal.parallel.tensor import parallelize
from tests.helpers.live_storages import LiveStorages
from tests.helpers.tensor_cases import tp_communicator
from tests.helpers.training import BF16, config, make
from tests.ranks.parallel.tensor.test_grid import LLAMA_PLAN, LlamaLayer
from tests.ranks.running.test_memory import adam, state_bytes

WITHIN = 0.02
ROWS, LENGTH, HIDDEN, HEADS, VOCABULARY = 2, 32, 128, 8, 256


def gpt() -> GPT:
    return GPT(GPTConfig(VOCABULARY, LENGTH, 2, HIDDEN, HEADS, tied=False))


def state_formula(stage: int, ranks: int, psi: int) -> float:
    whole, sharded = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}[stage]
    return psi * (whole + sharded / ranks)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_holds_the_state_of_its_part_of_the_model(tp: int, stage: int) -> None:
    dp = 2
    norms = 5 * HIDDEN  # two norms a layer and the last one are whole on every rank
    psi = norms + (2 * 12 * HIDDEN**2 + 2 * VOCABULARY * HIDDEN) // tp

    def job() -> tuple[int, int, int]:
        with LiveStorages() as live:
            model = make(gpt)
            engine = shoal.initialize(
                model=model, optimizer=adam(model.parameters()), config=config(stage, **BF16, parallel={"tp": tp})
            )[0]
            tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCABULARY
            for _ in range(2):
                engine.backward(engine(tokens, tokens))
                engine.step()
            ledger = engine.memory_report()
            del model
            found = state_bytes(ledger), live.now(), ledger.held
        engine.destroy()
        return found

    for state, alive, held in run_ranks(tp * dp, job):
        assert state == pytest.approx(state_formula(stage, dp, psi), rel=WITHIN)
        assert held <= alive <= held + 2048  # a few views of offsets and order: as on data parallel ranks


def kept_bytes(module: nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes of the storages that autograd keeps of a forward pass, without those of parameters and later inputs."""
    not_kept = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *inputs[1:])}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_kept:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*inputs)
    return sum(storage.nbytes() for storage in kept.values())


class OneBlock(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(GPTConfig(1, LENGTH, 1, HIDDEN, HEADS, dropout=dropout))])

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks[0](hidden, cos, sin)
        return out


def inputs(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.ones(ROWS, len(positions), HIDDEN).cumsum(-1).requires_grad_()
    return hidden, *rotations(positions, HIDDEN // HEADS, torch.float32)


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return (scores + torch.full_like(scores, float("-inf")).triu(1)).softmax(-1) @ value


@pytest.mark.parametrize("splits_sequence", [False, True])
@pytest.mark.parametrize(("dropout", "is_fused"), [(0.0, True), (0.1, True), (0.0, False)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_layer_keeps_the_activations_of_the_formula(
    size: int, dropout: float, is_fused: bool, splits_sequence: bool
) -> None:
    tokens = ROWS * LENGTH
    t, outside = size, size if splits_sequence else 1
    elements = tokens * HIDDEN * (4 / outside + 12 / t + (2 / outside if dropout else 0))
    elements += 2 * 2 * tokens / outside  # of norms
    elements += tokens * HEADS * (1 if is_fused else LENGTH) / t  # log-sum-exp, or softmax

    def job() -> int:
        layer = OneBlock(dropout)
        if not is_fused:
            layer.blocks[0].attention.attention = plain_attention
        parallelize(layer, tp_communicator(), sequence_parallel=splits_sequence)
        return kept_bytes(layer, *inputs(torch.arange(LENGTH)))

    for found in run_ranks(size, job):
        assert found == pytest.approx(4 * elements, rel=WITHIN)


class OneLlamaLayer(nn.Module):
    """Separate projections of queries, keys and values read one gathered input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LlamaLayer(4)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers[0](hidden)
        return out


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
def test_projections_that_share_an_input_keep_one_part_of_it(precision: str) -> None:
    def job(size: int) -> int:
        layer = OneLlamaLayer()
        if size > 1:
            plan = {f"layers.*.{name}": style for name, style in LLAMA_PLAN.items()}
            plan["layers.*.self_attn"] = "prepare_input"
            parallelize(layer, tp_communicator(), plan, sequence_parallel=True)
        hidden = torch.ones(ROWS, LENGTH, layer.layers[0].down.out_features).cumsum(-1).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            return kept_bytes(layer, hidden)

    (whole,) = run_ranks(1, job, 1)
    for found in run_ranks(2, job, 2):
        assert found <= (1 + WITHIN) * whole / 2
        if precision == "fp32":  # autocast makes a copy of the input for each projection of the whole layer
            assert found == pytest.approx(whole / 2, rel=WITHIN)


def in_a_sequence(axes: dict[str, int], layer: Callable[[], nn.Module]) -> list[int]:
    """What each rank keeps of one layer, on ranks that have parts of a sequence."""

    def job() -> int:
        world = current_world()
        mesh = Mesh.of(world.size, **axes)
        comms: dict[str, Any] = {axis: world.communicator(axis, mesh) for axis in axes}
        context = SequenceContext(**comms, length=LENGTH)
        with shoal.sequence_parallel(context):
            return kept_bytes(layer(), *inputs(context.positions(LENGTH, torch.device("cpu"))))

    return run_ranks(max(1, torch.Size(axes.values()).numel()), job)


def spread() -> nn.Module:
    layer = OneBlock()
    layer.blocks[0].attention.attention = shoal.attention
    return layer


@pytest.mark.parametrize("axes", [{"cp": 2}, {"cp": 4}, {"sp": 2}, {"sp": 4}, {"sp": 2, "cp": 2}])
def test_ranks_with_parts_of_a_sequence_keep_their_share_of_one_ranks_activations(axes: dict[str, int]) -> None:
    """Ulysses keeps attention's output twice: by heads for attention itself, by positions for the output projection."""
    (whole,) = in_a_sequence({}, spread)
    by_positions = 4 * ROWS * LENGTH * HIDDEN if "sp" in axes else 0
    ranks = torch.Size(axes.values()).numel()
    for found in in_a_sequence(axes, spread):
        assert found == pytest.approx((whole + by_positions) / ranks, rel=WITHIN)
