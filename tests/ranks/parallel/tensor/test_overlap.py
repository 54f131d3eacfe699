"""``tp_overlap_comm``: the values and the bytes of plain layers, in chunks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.parts import PartsCommunicator
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


of_layers = pytest.mark.parametrize(
    ("make", "forward", "options", "name"),
    [
        (gpt, loss_alone, {"loss_parallel": True}, "blocks.1.attention"),
        (lambda: randomize(Layers(6, 6, False)), of_attention, {"plan": SEPARATE}, "layers.1.attn"),
        (lambda: randomize(Layers(6, 1, False)), of_attention, {"plan": SEPARATE}, "layers.1.attn"),
        (lambda: randomize(GatedLayers()), of_gated, {"plan": GATED_PLAN}, "layers.1.mlp"),
    ],
    ids=["fused", "query key value", "shared heads", "gate and up"],
)


@of_layers
def test_products_overlapped_by_parts_compute_the_same_and_communicate_the_same_bytes(
    make: Any, forward: Forward, options: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_overlapped(make, forward, options, name, "by parts", monkeypatch)


@pytest.mark.parametrize("sequence", ["whole", "split"])
@of_layers
def test_overlapped_layers_compute_the_same_and_communicate_the_same_bytes(
    make: Any, forward: Forward, options: dict[str, Any], name: str, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_overlapped(make, forward, options, name, sequence, monkeypatch)


def check_overlapped(
    make: Any, forward: Forward, options: dict[str, Any], name: str, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**options, "sequence_parallel": sequence != "whole"}
    plain = compare(make(), twice(forward), 2, **options)
    if sequence == "by parts":
        monkeypatch.setattr(tensor_cases, "tp_communicator", lambda: PartsCommunicator(tp_communicator()))
    overlapped = compare(make(), twice(forward), 2, overlap=True, **options)
    for calls, chunked in zip(plain, overlapped, strict=True):
        nbytes, in_chunks = Counter[str](), Counter[str]()
        for call in calls:
            nbytes[call.label] += call.nbytes
        for call in chunked:
            in_chunks[call.label] += call.nbytes
        assert in_chunks == nbytes
        counts = Counter(call.label for call in chunked if call.op != "send")
        # one call each forward; where all ranks have the whole sequence, sums in four chunks
        assert counts[f"{name} in"] == (0 if sequence == "whole" else 2)
        assert counts[f"{name} in backward"] == 2
        outs = {label for label in counts if label.startswith(name) and label.endswith(" out")}
        assert {counts[label] for label in outs} == {8 if sequence == "whole" else 2}
        verbs = {"whole": "all_reduce", "split": "reduce_scatter", "by parts": "recv"}
        assert {call.op for call in chunked if call.label in outs} - {"send"} == {verbs[sequence]}
