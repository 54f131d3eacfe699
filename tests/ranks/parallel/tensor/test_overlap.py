"""``tp_overlap_comm``: the values and the bytes of plain layers, in chunks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.symmetric import SymmetricCommunicator
from tests.helpers import tensor_cases
from tests.helpers.tensor_cases import Forward, Outputs, compare, randomize, tp_communicator
from tests.ranks.parallel.tensor.test_shared_heads import BATCH, HIDDEN, LENGTH, SEPARATE, Layers
from tests.ranks.parallel.tensor.test_shared_heads import forward as of_attention
from tests.ranks.parallel.tensor.test_tensor_parallel import gpt, loss_alone

INPUT = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))


class Gated(nn.Module):
    """Gate and up; a router reads their input too. The names of Transformers' Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 20, bias=False), nn.Linear(HIDDEN, 20)
        self.down_proj = nn.Linear(20, HIDDEN)
        self.router = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x) * self.router(x).mean(-2, True))
        return out


class GatedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(x)
        return out


class GatedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedLayer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


GATED_PLAN = {"mlp": "prepare_input", "gate_proj": "column", "up_proj": "column", "down_proj": "row"}
GATED_PLAN["router"] = "replicate"


def twice(forward: Forward) -> Forward:
    """The columns that read one input are known from the second call on, once the first one's backward has run."""

    def both(model: nn.Module) -> Outputs:
        forward(model)["loss"].backward()
        model.zero_grad()
        return forward(model)

    return both


def of_gated(model: nn.Module) -> Outputs:
    return {"loss": model(INPUT)}


models = pytest.mark.parametrize(
    ("make", "forward", "options", "name"),
    [
        (gpt, loss_alone, {"loss_parallel": True}, "blocks.1.attention"),
        (lambda: randomize(Layers(6, 6, False)), of_attention, {"plan": SEPARATE}, "layers.1.attn"),
        (lambda: randomize(Layers(6, 1, False)), of_attention, {"plan": SEPARATE}, "layers.1.attn"),
        (lambda: randomize(GatedLayers()), of_gated, {"plan": GATED_PLAN}, "layers.1.mlp"),
    ],
    ids=["fused", "query key value", "shared heads", "gate and up"],
)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@models
def test_overlapped_layers_compute_the_same_and_communicate_the_same_bytes(
    make: Any, forward: Forward, options: dict[str, Any], name: str, sequence_parallel: bool
) -> None:
    options = {**options, "sequence_parallel": sequence_parallel}
    plain = compare(make(), twice(forward), 2, **options)
    overlapped = compare(make(), twice(forward), 2, overlap=True, **options)
    for calls, chunked in zip(plain, overlapped, strict=True):
        nbytes, in_chunks = Counter[str](), Counter[str]()
        for call in calls:
            nbytes[call.label] += call.nbytes
        for call in chunked:
            in_chunks[call.label] += call.nbytes
        # Plain columns gather their input again in backward; overlapped ones, from the second forward on, keep it.
        # Those of the first layer, whose input has no gradient, stay plain.
        for label in [label for label in nbytes if label.endswith(" again backward")]:
            assert in_chunks[label] in ((nbytes[label],) if label.startswith("layers.0.") else (0, nbytes[label] // 2))
            del nbytes[label], in_chunks[label]
        assert in_chunks == nbytes
        counts = Counter(call.label for call in chunked)
        # one call of the first forward, four chunks of the second one
        assert counts[f"{name} in"] == (5 if sequence_parallel else 0)
        assert counts[f"{name} in backward"] == (5 if sequence_parallel else 2)
        assert {counts[label] for label in counts if label.startswith(name) and label.endswith(" out")} == {8}


@models
def test_products_by_parts_compute_the_same(
    make: Any, forward: Forward, options: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tensor_cases, "tp_communicator", lambda: SymmetricCommunicator(tp_communicator(), torch.device("cpu"))
    )
    for calls in compare(make(), twice(forward), 2, overlap=True, sequence_parallel=True, **options):
        counts = Counter((call.label, call.op) for call in calls)
        # a batch of one send and one receive, forward and backward, in both calls
        assert {counts[key] for key in counts if key[0].startswith(name) and key[0].endswith(" out")} == {2}
        assert counts[f"{name} in", "recv"] == counts[f"{name} in", "all_gather"] == 1  # together, in the second call
