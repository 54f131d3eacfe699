"""The syntax tree of a function's source."""

from __future__ import annotations

import ast
import gc
import time
import typing
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import Signature

import pytest

from shoal.source import syntax_tree


class Model:
    def forward(self) -> int:
        return 1


def test_a_method_is_parsed_though_it_is_indented() -> None:
    tree = syntax_tree(Model.forward)
    assert tree is not None
    assert [type(node) for node in tree.body] == [ast.FunctionDef]


@pytest.mark.parametrize("function", [len, partial(len)])
def test_a_function_without_a_source_of_its_own_has_no_tree(function: typing.Any) -> None:
    assert syntax_tree(function) is None


class Cycle:
    """Garbage that lets another thread run while it is collected."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(1e-4)


def test_threads_that_parse_at_once_do_not_fail() -> None:
    """In Python 3.11 such threads raise ``SystemError: AST constructor recursion depth mismatch``."""

    def parse(_: int) -> bool:
        Cycle()
        return syntax_tree(Signature.replace) is not None

    before = gc.get_threshold()
    gc.set_threshold(20, *before[1:])
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(parse, range(400)))
    finally:
        gc.set_threshold(*before)
