"""Which labels of a micro-batch are targets that its loss counts."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn

from shoal.errors import UsageError
from shoal.source import syntax_tree


def targets_of(batch: Any, model: nn.Module | None) -> torch.Tensor:
    """The targets of a micro-batch: "labels" of a dict; of a tuple the argument of this name, or else the second.

    Args:
        model: computes the loss itself. It may take "shift_labels" in their place; or shift the labels, so that the
            first of each row is no target. None: a loss function takes the labels as they are.

    Raises: UsageError: there are none.
    """
    if isinstance(batch, tuple | list) and len(batch) > 1:
        names = [] if model is None else argument_names(model)[: len(batch)]
        batch = {"labels": batch[names.index("labels") if "labels" in names else 1]}
    given: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
    shifted = None if model is None else given.get("shift_labels")
    labels = given.get("labels") if shifted is None else shifted
    if not isinstance(labels, torch.Tensor):
        raise UsageError(
            'loss_reduction is "token", but the micro-batch has no labels to count.',
            do='give dicts with "labels", or tuples (inputs, labels).',
            code="loss-tokens",
        )
    return labels[..., 1:] if shifted is None and model is not None and shifts_labels(model) else labels


def shifts_labels(model: Any) -> bool:
    """True if a model takes each label for the target of the position before, as causal models of Transformers do."""
    model = without_adapters(model)
    owner: Any = next((module for module in model.modules() if "labels" in argument_names(module)), model)
    shifts, calls_loss = _read(_code_of(type(owner).forward))
    if shifts or not calls_loss:
        return shifts
    said: bool | None = getattr(owner.loss_function, "shifts_labels", None)  # a loss of split logits in its place
    return _read(_code_of(owner.loss_function))[0] if said is None else said


def without_adapters(model: Any) -> Any:
    """The model inside of a wrapper of PEFT, which passes its arguments on; another model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def argument_names(module: Any) -> list[str]:
    """The names of the arguments of the module's forward, in their order."""
    return list(inspect.signature(module.forward).parameters)


def _code_of(function: Any) -> CodeType | None:
    function = function if inspect.isroutine(function) else type(function).__call__
    return getattr(inspect.unwrap(function), "__code__", None)


@cache
def _read(code: CodeType | None) -> tuple[bool, bool]:
    """By its source: True if a function slices labels from 1 on; True if it names the model's ``loss_function``."""
    tree = None if code is None else syntax_tree(code)
    nodes = [] if tree is None else list(ast.walk(tree))
    shifts = any(isinstance(node, ast.Subscript) and _is_shifted(node) for node in nodes)
    return shifts, any(isinstance(node, ast.Attribute) and node.attr == "loss_function" for node in nodes)


def _is_shifted(node: ast.Subscript) -> bool:
    last = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
    is_from_1 = isinstance(last, ast.Slice) and isinstance(last.lower, ast.Constant) and last.lower.value == 1
    return is_from_1 and "labels" in ast.unparse(node.value)
