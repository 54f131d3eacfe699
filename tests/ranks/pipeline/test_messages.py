"""What crosses from one pipeline stage to the next: structures, dtypes, tensors without gradients, other shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from shoal.parallel.sequence.chunks import Documents
from shoal.pipeline.messages import MessageForm, flatten, unflatten
from tests.helpers.pipeline_cases import assert_as_alone, engine_of_layers
from tests.helpers.pipeline_layers import WIDTH, batches


class Begin(nn.Module):
    """Returns a dict with a nested tuple, None, integers, booleans, a number, and a tensor without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.linear(value))
        return {
            "hidden": (hidden, None),
            "mask": value > 0,
            "order": [value.argsort(dim=-1), 2],
            "given": value,
            "unused": hidden * 3,
            "empty": hidden[:0],
            "first": hidden.sum(),
            "name": "rows",
        }


class Middle(nn.Module):
    """Uses some of what it gets, and passes on all but ``unused``; the last layer uses ``first`` of the first."""

    def __init__(self, *, is_last: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_last = is_last

    def forward(self, given: dict[str, Any]) -> Any:
        hidden, nothing = given["hidden"]
        order, factor = given["order"]
        assert nothing is None
        assert given["name"] == "rows"
        assert isinstance(given["order"], list)
        assert order.dtype is torch.int64
        assert given["mask"].dtype is torch.bool
        assert given["empty"].shape == (0, WIDTH)
        hidden = torch.where(given["mask"], self.linear(hidden), hidden).gather(-1, order) / factor
        if self.is_last:
            return hidden + given["first"] + given["given"]
        return {**given, "hidden": (hidden, None), "unused": hidden.detach()}


class Hard(nn.Module):
    """Its output has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.linear(value).sign().detach()


def structured() -> Sequence[nn.Module]:
    return [Begin(), *(Middle() for _ in range(6)), Middle(is_last=True)]


LAYOUTS = [(2, 2, 1, "1f1b", 1), (4, 4, 3, "1f1b", 1), (2, 2, 3, "zbv", 2), (2, 2, 2, "interleaved_1f1b", 2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nested_values_of_any_dtype_cross_all_boundaries(layout: tuple[Any, ...]) -> None:
    assert_as_alone(structured, *layout)


def test_nothing_is_sent_back_to_a_stage_whose_output_has_no_gradient() -> None:
    def layers() -> Sequence[nn.Module]:
        made: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
        made[3] = Hard()
        return made

    assert_as_alone(layers, *LAYOUTS[0])


def ragged(rank: int, step: int, num_micro: int) -> Iterator[Any]:
    """Micro-batches of one to three rows."""
    for micro, (inputs, labels) in enumerate(batches(rank, step, num_micro)):
        rows = 1 + (micro + step) % 3
        yield inputs.repeat(2, 1)[:rows], labels.repeat(2, 1)[:rows]


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[2]])
def test_shapes_change_from_micro_batch_to_micro_batch(layout: tuple[Any, ...]) -> None:
    assert_as_alone(structured, *layout, data=ragged)


def test_a_structure_is_sent_once_for_each_new_shape() -> None:
    def job() -> Any:
        engine = engine_of_layers(structured, 2, 1, num_micro=6)
        sent = []
        for step in range(2):
            with current_world().recorder.recording() as found:
                engine.train_batch(ragged(0, step, 6))
            sent.append([e.label.endswith("structure") for e in found if e.op == "send" and e.axis == "pp"].count(True))
        with current_world().recorder.recording() as found:
            engine.train_batch(iter([next(batches(0, 0, 1))[:1] * 2] * 6))
        return sent, sum(e.op == "send" and e.axis == "pp" for e in found)

    first, last = run_ranks(2, job)
    assert first[0] == [2 * 3, 0]  # a size and a text for each of three shapes
    assert last[0] == [0, 0]  # what goes back is known
    assert first[1] == last[1] == 6  # of a shape that is known: nothing but the tensors


class Chosen(nn.Module):
    """Keeps the rows whose sum is above zero: how many depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.linear(value)
        return value[value.detach().sum(dim=-1) > 0]


def mean_of_rows(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return output.square().sum() + labels.mean() * 0


def many(rank: int, step: int, num_micro: int) -> Iterator[Any]:
    for inputs, labels in batches(rank, step, num_micro):
        yield torch.cat([inputs, -inputs, labels]), labels


def chosen() -> Sequence[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), Chosen(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]


@pytest.mark.parametrize("layout", [(2, 2, 1, "1f1b", 1), (2, 2, 3, "zbv", 2)])
def test_shapes_that_depend_on_values_need_dynamic_shape(layout: tuple[Any, ...]) -> None:
    assert_as_alone(chosen, *layout, data=many, loss_fn=mean_of_rows, dynamic_shape=True)


def test_shapes_that_depend_on_values_are_refused_without_dynamic_shape() -> None:
    def job() -> None:
        engine = engine_of_layers(chosen, 2, 1, num_micro=16, loss_fn=mean_of_rows)
        batches_of_four_steps = (batch for step in range(4) for batch in many(0, step, 4))
        with pytest.raises(UsageError, match="dynamic_shape=True"):
            engine.train_batch(batches_of_four_steps)

    run_ranks(2, job)


def test_what_cannot_be_sent_is_refused_with_its_place() -> None:
    class Odd(nn.Linear):
        def forward(self, value: torch.Tensor) -> Any:
            return {"a": (super().forward(value), {1, 2})}

    def job() -> None:
        engine = engine_of_layers(lambda: [Odd(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], 2, 1)
        with pytest.raises(UsageError, match="returns a set, which cannot be sent"):
            engine.train_batch(batches(0, 0, 4))

    run_ranks(2, job)


def test_evaluation_sends_structures_too() -> None:
    def job() -> Any:
        engine = engine_of_layers(structured, 2, 3)
        return [float(engine.eval_batch(ragged(0, 0, 4))) for _ in range(2)] + [
            float(engine.train_batch(ragged(0, 0, 4)))
        ]

    for losses in run_ranks(2, job):
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_documents_of_a_batch_are_sent_with_how_rows_are_divided() -> None:
    plain = Documents.of_lengths([[3, 5], [8]])
    batch = {"documents": [plain, plain.balanced()], "ids": torch.arange(3)}
    form, tensors = flatten(batch, "stage 0")
    received = unflatten(MessageForm.from_json(form.to_json()).tree, tensors)
    assert received["documents"] == batch["documents"] and received["documents"][1].chunked_by == plain.begins
