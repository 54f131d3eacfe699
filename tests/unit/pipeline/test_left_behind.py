"""What blocks leave behind for the loss reaches the stages behind, with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.pipeline.cut import cut
from tests.helpers.left_behind_models import (
    ALL,
    WIDTH,
    Model,
    attributes,
    attributes_of_modules,
    build,
    hidden_states,
    hooks,
    shared_list,
)
from tests.helpers.pipeline_stages import cut_over, run_stages, run_whole

RANKS = [[(0,), (1,)], [(0,), (1,), (2,)], [(0, 2), (1, 3)], [(0,), (1,), (2,), (3,), (4,), (5,)]]
BATCHES = [{"hidden": torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))} for seed in range(2)]


def output_is_loss(output: Any, batch: Any) -> Tensor:
    assert isinstance(output, Tensor)
    return output


@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("run", ALL)
def test_what_the_loss_reads_of_blocks_of_other_stages_is_sent(run: Any, ranks: list[tuple[int, ...]]) -> None:
    batches = [{"hidden": batch["hidden"].double()} for batch in BATCHES]  # gradients are summed in another order
    whole = run_whole(build(run).double(), batches, output_is_loss)
    parts = cut_over(build(run).double(), ranks)
    stages = run_stages(parts, batches)
    assert all(torch.equal(one, other) for one, other in zip(whole[0], stages[0], strict=True))
    for name, gradient in whole[1].items():
        assert (gradient is None) == (stages[1][name] is None), name
        torch.testing.assert_close(stages[1][name], gradient, rtol=1e-12, atol=1e-12, msg=name)
    evaluated = [[part.eval() for part in parts]]
    if run is not attributes_of_modules:  # only a backward shows that they are left for the loss
        evaluated.append([part.eval() for part in cut_over(build(run).double(), ranks)])
    with torch.no_grad():
        whole = run_whole(build(run).double().eval(), batches, output_is_loss)
        for parts in evaluated:
            assert torch.equal(torch.stack(run_stages(parts, batches)[0]), torch.stack(whole[0]))


@pytest.mark.parametrize("run", [attributes, shared_list, hooks])
def test_a_loss_function_reads_what_blocks_left_behind(run: Any) -> None:
    """The model returns the hidden states alone."""

    def made() -> tuple[Model, Callable[[Any, Any], Tensor]]:
        model = build(in_turn, run)

        def loss(output: Tensor, labels: Tensor) -> Tensor:
            left = {attributes: [b.aux for b in model.blocks], shared_list: model.sink, hooks: model.features.of}[run]
            assert len(left) == (7 if run is hooks else 6)
            return nn.functional.mse_loss(output, labels) + sum(value.pow(2).mean() for value in left)

        return model, loss

    batch = (BATCHES[0]["hidden"], BATCHES[1]["hidden"])
    model, loss_fn = made()
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    parts = []
    for stage in range(3):
        one, loss_fn = made()
        parts.append(cut(one, 3, stages_of_rank=(stage,), loss_fn=loss_fn))
    found = run_stages(parts, [batch])
    assert torch.equal(found[0][0], loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[1][name], parameter.grad, rtol=1e-6, atol=1e-7, msg=name)


def in_turn(model: Any, hidden: Tensor) -> Tensor:
    for block in model.blocks:
        hidden = block(hidden)
    return hidden


def local_skip(model: Any, hidden: Tensor) -> Tensor:
    hidden = skip = model.blocks[0](hidden)
    for block in model.blocks[1:]:
        hidden = block(hidden)
    return (hidden * skip).sum()


def local_skip_as_argument(model: Any, hidden: Tensor) -> Tensor:
    hidden = skip = model.blocks[0](hidden)
    for block in model.blocks[1:5]:
        hidden = block(hidden)
    return model.blocks[5](hidden, skip=skip).sum()


def local_embedding(model: Any, hidden: Tensor) -> Tensor:
    return (in_turn(model, hidden) + hidden).sum()


@pytest.mark.parametrize(
    ("run", "of"), [(local_skip, "blocks.0"), (local_skip_as_argument, "blocks.0"), (local_embedding, "embedding")]
)
def test_what_is_not_sent_is_refused_by_name(run: Any, of: str) -> None:
    with pytest.raises(ModelError, match=rf"it uses .*'{of}' \(.*which this pipeline stage does not have"):
        run_stages(cut_over(build(run), RANKS[1]), BATCHES)


def test_nothing_is_sent_that_the_model_does_not_keep() -> None:
    sent = cut_over(build(in_turn), RANKS[0])[0](0, None, BATCHES[0])
    assert {tuple(path[1:4]) for path, _ in sent["left"]} == {
        ("module", "aux"),
        ("module", "router", "probabilities"),
        ("module", "router", "counts"),
        ("module", "router", "of_pass"),
        ("module", "router", "log"),
    }


def test_a_block_that_is_recomputed_together_with_the_next_one_has_no_output_of_its_own() -> None:
    parts = cut_over(build(hidden_states), RANKS[0])
    for part in parts:
        part.activation_checkpoint_interval = 2
    with pytest.raises(ModelError, match=r"'blocks\.\d', which is recomputed .*activation_checkpoint_interval; 1"):
        run_stages(parts, BATCHES)
    for run in (attributes, shared_list):
        whole = run_whole(build(run), BATCHES, output_is_loss)
        parts = cut_over(build(run), RANKS[0])
        for part in parts:
            part.activation_checkpoint_interval = 2
        stages = run_stages(parts, BATCHES)
        torch.testing.assert_close(stages, whole, rtol=1e-6, atol=1e-7)


def test_a_hook_that_only_the_blocks_own_stage_has_is_refused_if_it_keeps_gradients() -> None:
    """Hooks that were registered after the cut."""

    def hooked(keep: Callable[[Tensor], Tensor]) -> tuple[list[Any], list[Tensor]]:
        parts = cut_over(build(in_turn), RANKS[0], loss_fn=lambda output, labels: output.sum())
        kept: list[Tensor] = []
        for module in parts[0].modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda module, args, output: kept.append(keep(output)))
        return parts, kept

    batch = (BATCHES[0]["hidden"], None)
    parts, kept = hooked(Tensor.detach)
    run_stages(parts, [batch])
    assert len(kept) == 7
    with pytest.raises(ModelError, match=r"'embedding' leaves a tensor with .*\n.*\n.*hooks before initialize\(\)"):
        run_stages(hooked(lambda output: output)[0], [batch])
