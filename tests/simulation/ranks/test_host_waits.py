"""How often the host waits for values of the device in a step: the fewer, the further ahead it queues kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.data import InMemorySource, TokenStream
from shoal.mesh import Mesh
from shoal.models import GPT, GPTConfig
from shoal.parallel.expert.layer import MoE
from shoal.parallel.expert.stacked import ExpertFeedForward
from shoal.parallel.sequence.attention import attention
from shoal.parallel.sequence.chunks import Documents
from shoal.parallel.sequence.context import SequenceContext
from tests.helpers.stream_changes import UsedOnOneRank, host_reads
from tests.helpers.training import config

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
DENSE = GPTConfig(vocab_size=64, sequence_length=16, num_layers=4, hidden_size=32, num_heads=4, tied=False)
EXPERTS = GPTConfig(
    vocab_size=64, sequence_length=16, num_layers=2, hidden_size=32, num_heads=4, num_experts=4, tied=False
)
PRECISIONS: list[dict[str, Any]] = [
    {},
    {"bf16": {"enabled": True}, "gradient_clipping": 0.1},
    {"fp16": {"enabled": True, "loss_scale": 8}},
    {"fp16": {"enabled": True, "loss_scale": 0}},
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("more", PRECISIONS, ids=str)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_once_a_step(stage: int, more: dict[str, Any], accumulation: int) -> None:
    found = host_reads(config(stage, gradient_accumulation_steps=accumulation, **more))
    assert found.total() == 1, found
    assert "synchronize_status" in next(iter(found))


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_without_a_gradient_add_none(stage: int) -> None:
    found = host_reads(config(stage), UsedOnOneRank)
    assert found.total() == 1, found


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(
    "more",
    [{"zero_optimization": {"stage": 2}}, {"activation_checkpointing": {"modules": ["*deepspeed_moe"]}}],
    ids=str,
)
def test_experts_with_a_capacity_add_none(ep: int, k: int, more: dict[str, Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                MoE(8, nn.Linear(8, 8), 4, ep, k=k, min_capacity=1, use_rts=False, top2_2nd_expert_sampling=False)
                for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            losses = []
            for block in self.blocks:
                x, loss, _ = block(x)
                losses.append(loss)
            return x.square().mean() + sum(losses)

    found = host_reads(config(0, parallel={"ep": ep}, **more), Model)
    assert found.total() == 1, found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_optimizer_on_the_host_adds_none(stage: int, accumulation: int) -> None:
    """With accumulation, stages 2 and 3 have the sum of the gradients, and its norm, on the host."""
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    found = host_reads(config(stage, gradient_accumulation_steps=accumulation, zero_optimization=zero))
    assert found.total() == 1, found


@pytest.mark.parametrize(
    ("more", "num_more"),
    [
        ({"parallel": {"tp": 2}}, 0),
        ({"parallel": {"pp": 2}, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}, 0),
        (
            {
                "parallel": {"pp": 2},
                "gradient_accumulation_steps": 4,
                "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
            },
            0,
        ),
        # Experts without a capacity read how many rows go to each rank; their recomputation does not read them again.
        ({"parallel": {"ep": 2}, "zero_optimization": {"stage": 2}}, EXPERTS.num_layers),
        ({"parallel": {"ep": 2}, "activation_checkpointing": {"modules": ["Block"]}}, EXPERTS.num_layers),
    ],
    ids=str,
)
def test_split_models_add_one_for_each_layer_of_experts_and_no_other(more: dict[str, Any], num_more: int) -> None:
    def rank() -> Counter[str]:
        torch.manual_seed(0)
        batch = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
        with shoal.check_streams() as check:
            model = GPT(EXPERTS, experts=ExpertFeedForward) if "ep" in more["parallel"] else GPT(DENSE)
            settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAM, **more}
            engine: Any = shoal.initialize(model=model, config=settings)[0]
            for _ in range(4):  # the batches of the first three are compared between tensor-parallel ranks
                before = check.host_reads
                if "pp" in more["parallel"]:
                    engine.train_batch(iter([(batch, batch)] * engine.gradient_accumulation_steps()))
                else:
                    engine.backward(engine(batch, batch))
                    engine.step()
            found = check.host_reads - before
            engine.destroy()
        return found

    for found in run_ranks(2, rank):
        assert found.total() == 1 + num_more, found


@pytest.mark.parametrize(
    ("degrees", "schedule"), [({"pp": 4}, "1f1b"), ({"pp": 2, "cp": 2}, "zb_h1"), ({"pp": 2, "sp": 2}, "1f1b")], ids=str
)
@pytest.mark.parametrize("recompute", [{}, {"activation_checkpointing": {"modules": ["Block"]}}], ids=str)
def test_packed_documents_in_pipeline_stages_add_none(
    degrees: dict[str, int], schedule: str, recompute: dict[str, Any]
) -> None:
    def rank() -> Counter[str]:
        torch.manual_seed(0)
        documents = InMemorySource([range(1, 2 + each) for each in range(1, 40)])
        with shoal.check_streams() as check:
            model = GPT(DENSE)
            model.attend_by(attention)
            settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "optimizer": ADAM}
            settings |= {"parallel": degrees, "pipeline": {"schedule": schedule}}
            data = TokenStream(documents, 16)
            engine: Any = shoal.initialize(model=model, config={**settings, **recompute}, training_data=data)[0]
            engine.set_batch_fn(lambda batch: batch.shard(engine.sequence_context))
            for _ in range(3):
                before = check.host_reads
                engine.train_batch()
            found = check.host_reads - before
            engine.destroy()
        return found

    for found in run_ranks(4, rank):
        assert found.total() == 1, found


def test_documents_made_from_lengths_add_none_and_those_of_a_models_tensors_one_for_all_layers() -> None:
    def rank() -> list[tuple[int, Documents | None]]:
        with shoal.check_streams() as check:
            world = current_world()
            context = SequenceContext(
                sp=world.communicator("sp", Mesh.of(4, sp=2, cp=2)), cp=world.communicator("cp", Mesh.of(4, sp=2, cp=2))
            )
            ids, positions = torch.tensor([[1] * 5 + [2] * 11]), torch.tensor([[*range(5), *range(11)]])
            ids, positions, is_token = (context.shard(each) for each in (ids, positions, torch.arange(16)[None] < 14))
            own = positions.clone()  # not cut by the context
            query = torch.rand(1, 2, 4, 8).requires_grad_()
            found = []

            def wait(documents: Callable[[], Any], *, attends: bool = True) -> None:
                before = check.host_reads
                made = documents()
                if attends:
                    attention(query, query, query, is_causal=True, documents=made, context=context).sum().backward()
                found.append(((check.host_reads - before).total(), made if isinstance(made, Documents) else None))

            wait(lambda: Documents.of_lengths([[5, 11]]))
            wait(lambda: context.documents_of(own, is_token))
            wait(lambda: context.documents_of(own, is_token))
            wait(lambda: context.documents_of(own, None))
            wait(lambda: context.documents_of(None, is_token), attends=False)
            wait(lambda: ids)
            wait(lambda: ids)  # of the next layer
            ids.add_(1)
            wait(lambda: ids)
        return found

    packed = Documents.of_lengths([[5, 11]])
    padded = Documents.of_lengths([[5, 9, 2]])
    for found in run_ranks(4, rank):
        assert found == [
            (0, packed),
            (1, padded),
            (0, padded),
            (1, packed),
            (1, Documents.of_lengths([[14, 2]])),
            (1, None),
            (0, None),
            (1, None),
        ]
