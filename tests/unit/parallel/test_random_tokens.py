"""What a layer gets of the kept positions: hidden states, and what belongs to positions beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.errors import ModelError, UsageError
from shoal.parallel.random_tokens import Draw, RandomTokens
from shoal.parallel.sequence.chunks import Documents

ROWS, LENGTH, WIDTH, KEPT = 3, 10, 4, 6


def tokens(**settings: Any) -> RandomTokens:
    made = RandomTokens(["first", "second"], **settings)
    made.draw = Draw(seed=1, step=2, kept=KEPT, micro_batch=0)
    return made


def positions(rows: int = ROWS, layer: int = 1) -> Tensor:
    return Draw(1, 2, KEPT, 0).positions(layer, rows, ROWS, LENGTH, torch.device("cpu"))


def test_positions_are_distinct_in_order_and_of_each_sample_step_and_layer() -> None:
    drawn = positions()
    assert (drawn.diff(dim=1) > 0).all() and drawn.min() >= 0 and drawn.max() < LENGTH
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn, positions(layer=0))
    of_second = Draw(1, 2, KEPT, 1).positions(1, ROWS, ROWS, LENGTH, torch.device("cpu"))
    of_six = Draw(1, 2, KEPT, 0).positions(1, 2 * ROWS, 2 * ROWS, LENGTH, torch.device("cpu"))
    assert torch.equal(torch.cat([drawn, of_second]), of_six)  # of a sample, in whichever micro-batch it is


def test_every_position_is_kept_equally_often() -> None:
    counts = torch.zeros(LENGTH)
    for step in range(400):
        counts += Draw(5, step, KEPT, 0).positions(0, 1, 1, LENGTH, torch.device("cpu"))[0].bincount(minlength=LENGTH)
    assert (counts - 400 * KEPT / LENGTH).abs().max() < 50  # 5 standard deviations


@pytest.mark.parametrize("is_sequence_first", [False, True])
def test_what_belongs_to_positions_is_reduced_to_the_kept_ones(is_sequence_first: bool) -> None:
    hidden, drawn = torch.randn(ROWS, LENGTH, WIDTH), positions()
    mask, padding = torch.randn(ROWS, 2, LENGTH, LENGTH), torch.rand(ROWS, LENGTH) > 0.5
    keys = torch.randn(ROWS, 1, 1, LENGTH)
    ids = torch.arange(LENGTH).expand(1, LENGTH)
    cos = torch.randn(1, LENGTH, 2)
    seen: dict[str, Any] = {}

    def layer(part: Tensor, scale: float, **named: Any) -> tuple[Tensor, str]:
        seen.update(named, scale=scale)
        return part + 1, "kept"

    given = hidden.transpose(0, 1) if is_sequence_first else hidden
    for name, value in (("attention_mask", mask), ("padding", padding), ("keys", keys)):
        named = {"position_ids": ids, "position_embeddings": (cos, cos + 1), name: value}
        runner = tokens(is_sequence_first=is_sequence_first, mask_name=name)
        out, other = runner.run("second", layer, (given, 2.0), named)
        assert other == "kept" and seen["scale"] == 2.0
        whole = out.transpose(0, 1) if is_sequence_first else out
        for row in range(ROWS):
            expected = hidden[row].clone()
            expected[drawn[row]] += 1
            assert torch.equal(whole[row], expected)
            assert torch.equal(seen["position_ids"][row], drawn[row])
            assert torch.equal(seen["position_embeddings"][1][row], cos[0, drawn[row]] + 1)
    for row in range(ROWS):
        assert torch.equal(seen["attention_mask"][row], mask[row][:, drawn[row]][:, :, drawn[row]])
        assert torch.equal(seen["padding"][row], padding[row, drawn[row]])
        assert torch.equal(seen["keys"][row], keys[row][:, :, drawn[row]])


def test_rows_that_share_a_table_of_positions_keep_the_same() -> None:
    hidden, cos = torch.randn(ROWS, LENGTH, WIDTH), torch.randn(LENGTH, 2)
    seen = []
    tokens().run("second", lambda part, table: seen.append((part, table)) or part, (hidden, cos), {})
    drawn = positions(rows=1)[0]
    assert torch.equal(seen[0][0], hidden[:, drawn]) and torch.equal(seen[0][1], cos[drawn])


def test_gradients_of_tokens_that_pass_by_are_untouched() -> None:
    hidden = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(3.0, dtype=torch.float64)
    tokens().run("first", lambda part: part * weight, (hidden,), {}).sum().backward()
    expected = torch.ones(ROWS, LENGTH, dtype=torch.float64).scatter(1, positions(layer=0), 3.0)
    assert torch.equal(hidden.grad, expected.unsqueeze(-1).expand_as(hidden))


def test_layers_of_another_form_are_named() -> None:
    with pytest.raises(ModelError, match=r"layer first takes a tensor of shape .3, 4."):
        tokens().run("first", lambda part: part, (torch.randn(3, 4),), {})
    with pytest.raises(ModelError, match="layer first returns dict"):
        tokens().run("first", lambda part: {"out": part}, (torch.randn(ROWS, LENGTH, WIDTH),), {})
    documents = Documents.of_lengths([[4, 6]])
    with pytest.raises(UsageError, match="packed documents"):
        tokens().run("first", lambda part, d: part, (torch.randn(ROWS, LENGTH, WIDTH), documents), {})
