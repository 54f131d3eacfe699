"""Reads a pickle as data: records which objects it describes, and creates, imports and calls none of them.

A pickle is a program for a small stack machine. This one knows only the instructions that build text, numbers and
containers; where a program names a class, the name is kept, if it is one of those that the caller expects:

    Metadata(version="1.0.0")  ->  Built("torch.distributed.checkpoint.metadata.Metadata", (), {"version": "1.0.0"})

So a hostile pickle cannot run code. Memory is bounded by its length: no instruction allocates more than it contains.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from shoal.checkpoint.problems import damaged_copy, unsafe
from shoal.errors import CheckpointError


@dataclass(frozen=True)
class Symbol:
    """The name of a class, function or constant."""

    name: str


@dataclass(eq=False)
class Built:
    """The description of an object: its class's name, the arguments of the call, and its state."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None

    def get(self, key: str) -> Any:
        """An attribute of the state; None where there is none."""
        return self.state.get(key) if isinstance(self.state, dict) else None


_MARK = object()
_NO_OPERATION = frozenset({"PROTO", "FRAME"})
_VALUES = frozenset(
    ["BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"]
    + ["SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES"]
)
_NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
    "MARK": lambda: _MARK,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_Key = str | int | Built  # of dicts and sets: a nest of tuples can take for ever to hash


def read(data: bytes, expected: Collection[str], where: str) -> Any:
    """What a pickle holds.

    Args:
        expected: full names of classes, functions and constants that may be in it.

    Raises: CheckpointError: it asks for another name, or for an instruction that no plain data needs, or it is cut off.
    """
    machine = _Machine(frozenset(expected), where)
    try:
        for instruction, argument, _ in pickletools.genops(data):
            if instruction.name == "STOP":
                (result,) = machine.stack
                return result
            machine.do(instruction.name, argument)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged program leads to
        raise damaged_copy(f"it cannot be read: {type(error).__name__}: {str(error)[:200]}.", where) from error
    raise damaged_copy("it cannot be read: it has no end.", where)


class _Machine:
    def __init__(self, expected: frozenset[str], where: str) -> None:
        self._expected = expected
        self._where = where
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        """Raises: CheckpointError: an instruction or a name that is not expected. Others: a damaged program."""
        stack = self.stack
        if name in _NO_OPERATION:
            return
        if name in _VALUES:
            stack.append(argument)
        elif name in _NEW:
            stack.append(_NEW[name]())
        elif name in _TUPLES:
            stack.append(tuple(self._last(_TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = self._last(1) if name == "APPEND" else self._to_mark()
            if isinstance(stack[-1], set):
                stack[-1].update(map(_checked_key, items))
            else:
                self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._last(2) if name == "SETITEM" else self._to_mark()
            target = self._top(dict)
            for key, value in zip(items[::2], items[1::2], strict=True):
                target[_checked_key(key)] = value
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "GLOBAL":
            stack.append(self._symbol(argument.replace(" ", ".", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(self._symbol(".".join(self._last(2))))
        elif name in ("REDUCE", "NEWOBJ"):
            symbol, arguments = self._last(2)
            if not isinstance(symbol, Symbol) or not isinstance(arguments, tuple):
                raise TypeError("a call of something that is no name")
            stack.append(Built(symbol.name, arguments))
        elif name == "BUILD":
            state = stack.pop()
            self._top(Built).state = state
        else:
            raise unsafe(f"it has the instruction {name}, which no plain data needs.", self._where)

    def _last(self, number: int) -> list[Any]:
        if len(self.stack) < number:
            raise ValueError("too few values")
        items = self.stack[-number:]
        del self.stack[-number:]
        return items

    def _to_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a mark is missing")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def _top(self, kind: type[Any]) -> Any:
        top = self.stack[-1]
        if not isinstance(top, kind):
            raise TypeError(f"a {kind.__name__} was expected, and there is a {type(top).__name__}")
        return top

    def _symbol(self, name: str) -> Symbol:
        if name not in self._expected:
            raise unsafe(f"it asks for {name[:200]}, which is no part of such a file.", self._where)
        return Symbol(name)


def _checked_key(key: Any) -> Any:
    if not isinstance(key, _Key):
        raise TypeError(f"a {type(key).__name__} as a key")
    return key
