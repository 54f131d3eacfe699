"""Nested state comes back as it was, or is refused with its path."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.tree import decode, dtype_of, encode, name_of
from shoal.errors import CheckpointError


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, tensors, "state"), allow_nan=False)
    return decode(json.loads(text), tensors.__getitem__)


NUMBERS = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none() | st.text()
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text()) | st.frozensets(st.integers())
VALUES = st.recursive(
    NUMBERS | st.frozensets(NUMBERS) | st.sets(st.tuples(st.integers(), st.frozensets(st.integers()))),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """With its types: 1, 1.0 and True are equal, and so are (1,) and a named tuple."""
    if isinstance(value, dict):
        return [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [typed(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, value
    return type(value).__name__, repr(value)


@settings(max_examples=50)
@given(VALUES)
def test_plain_values_come_back_with_their_types_and_order(value: Any) -> None:
    assert typed(there_and_back(value)) == typed(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 2**80, -(2**63)])
def test_numbers_at_the_ends_come_back(value: float) -> None:
    assert repr(there_and_back(value)) == repr(value)


def test_not_a_number_comes_back() -> None:
    assert math.isnan(there_and_back([math.nan])[0])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.tensor(2.5, dtype=torch.float16),
        torch.tensor(7),
        torch.tensor(True),
        torch.tensor(math.nan),
        torch.tensor([1 + 2j]),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(3).to(torch.float8_e4m3fn),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)}",
)
def test_tensors_come_back(tensor: torch.Tensor) -> None:
    found = there_and_back({"a": [tensor]})["a"][0]
    assert found.dtype == tensor.dtype and found.shape == tensor.shape and not found.requires_grad
    assert found.tolist() == tensor.tolist() or math.isnan(float(found))


@pytest.mark.parametrize("array", [np.arange(3, dtype=np.int16), np.array(2.5), np.zeros((0, 2)), np.eye(2)[::-1]])
def test_arrays_come_back_as_arrays(array: np.ndarray[Any, Any]) -> None:
    array.flags.writeable = False
    found = there_and_back((array,))[0]
    assert isinstance(found, np.ndarray) and found.dtype == array.dtype and found.shape == array.shape
    assert found.tolist() == array.tolist()


def test_what_scripts_keep_of_their_command_line_comes_back() -> None:
    args = Namespace(out=Path("runs") / "a", device=torch.device("cuda:1"), rates=(0.1, math.inf), best=torch.ones(2))
    found = there_and_back({"args": args, "simple": SimpleNamespace(a=SimpleNamespace(), b=Namespace(__c=1))})
    assert isinstance(found["args"], Namespace) and list(vars(found["args"])) == ["out", "device", "rates", "best"]
    assert (found["args"].out, found["args"].device, found["args"].rates) == (args.out, args.device, args.rates)
    assert found["args"].best.tolist() == [1, 1]
    assert found["simple"] == SimpleNamespace(a=SimpleNamespace(), b=Namespace(__c=1))
    with pytest.raises(CheckpointError) as caught:
        encode({"args": Namespace(log=object())}, {}, "client_state")
    assert caught.value.where == "client_state/args/log"


def test_numpys_numbers_become_pythons() -> None:
    assert typed(there_and_back([np.float64(0.5), np.int32(3), np.bool_(True)])) == typed([0.5, 3, True])


def test_paths_that_are_written_alike_keep_their_tensors_separate() -> None:
    value = {"a": {"b": torch.zeros(1)}, "a/b": torch.ones(1), "c": [torch.ones(2)], "c/0": np.zeros(2)}
    found = there_and_back(value)
    assert [found["a"]["b"].item(), found["a/b"].item()] == [0.0, 1.0]
    assert found["c"][0].tolist() == [1.0, 1.0] and found["c/0"].tolist() == [0.0, 0.0]


def test_a_callers_dict_that_looks_like_a_mark_comes_back() -> None:
    value = {"__is__": "tensor", "name": "nothing"}
    assert there_and_back(value) == value
    assert there_and_back(OrderedDict(value)) == value


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (object, "a builtins.object,"),
        (lambda: print, "a builtins.builtin_function_or_method,"),
        (lambda: b"bytes", "a builtins.bytes,"),
        (lambda: 1j, "a builtins.complex,"),
        (lambda: deque([1]), "a collections.deque,"),
        (lambda: datetime.now(UTC), "a datetime.datetime,"),
        (lambda: torch.nn.Linear(1, 1), "a torch.nn.modules.linear.Linear,"),
        (lambda: np.array([object()]), "a numpy.ndarray of object,"),
        (lambda: np.array(["text"]), "a numpy.ndarray of <U4,"),
        (lambda: torch.eye(2).to_sparse(), "a torch.Tensor of layout torch.sparse_coo,"),
    ],
)
def test_a_value_that_cannot_be_saved_is_named_with_its_path(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        encode({"a": [0, {"b": make()}]}, {}, "client_state")
    assert caught.value.code == "checkpoint-state"
    assert words in caught.value.what
    assert caught.value.where == "client_state/a/1/b"


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="nested deeper than 100"):
        encode(value, {}, "client_state")


@pytest.mark.parametrize("mark", ["object", "eval", 3, None, ["tuple"], {}])
def test_marks_that_nobody_knows_are_refused(mark: Any) -> None:
    if mark is None:
        assert decode({"__is__": None, "a": 1}, {}.__getitem__) == {"__is__": None, "a": 1}
        return
    with pytest.raises(CheckpointError, match="unknown mark"):
        decode({"__is__": mark, "items": []}, {}.__getitem__)


def test_without_a_place_for_tensors_those_of_one_element_are_numbers_with_their_shape() -> None:
    text = json.dumps(
        encode({"step": torch.tensor([[3.5]], dtype=torch.bfloat16), "n": torch.tensor(2)}, None, "state")
    )
    back = decode(json.loads(text), {}.__getitem__)
    assert back["step"].shape == (1, 1) and back["step"].dtype is torch.bfloat16 and back["step"].item() == 3.5
    assert back["n"].shape == () and back["n"].item() == 2
    for value in (torch.zeros(2), np.zeros(2)):
        with pytest.raises(CheckpointError, match="cannot store"):
            encode({"a": value}, None, "state")


def test_dtypes_have_names() -> None:
    assert name_of(torch.bfloat16) == "bfloat16" and dtype_of("bfloat16") is torch.bfloat16
    with pytest.raises(CheckpointError, match="dtype 'object' is none of"):
        dtype_of("object")
