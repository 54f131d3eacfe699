"""What two pipeline stages send each other: tensors in tuples, lists and dicts, in one message, never through pickle.

    pack      the value's structure (JSON) and its tensors
    send      the tensors' bytes, in one send; alone, a tensor is sent as it is
    recv      the structure is known from an earlier message of the same signature, or comes before the tensors

The *signature* of a micro-batch is a number that all stages know: two micro-batches of the same signature have messages
of the same structure, so it is sent once.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import torch

from shoal.comm.fake import FakeStages
from shoal.comm.formats import WireFormat
from shoal.comm.protocol import Communicator, Work
from shoal.comm.wire import RowBytes
from shoal.errors import UsageError
from shoal.parallel.sequence.chunks import Documents

_ALIGNMENT = 16  # bytes, at which each tensor of a message begins
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not dtype.is_complex
}


@dataclass(frozen=True)
class TensorForm:
    """One tensor of a message."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    has_gradient: bool  # the receiver sends its gradient back
    is_gradient: bool = False

    @property
    def is_activation(self) -> bool:
        """True of what a format may encode: activations, and their gradients."""
        return (self.has_gradient or self.is_gradient) and self.dtype.is_floating_point and len(self.shape) > 1

    @cached_property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class MessageForm:
    """The structure of a message.

    Args:
        tree: nested lists that JSON can hold; a tensor is its index in ``tensors``.
    """

    tree: Any
    tensors: tuple[TensorForm, ...]

    @cached_property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def packed_nbytes(self) -> int:
        """Of all tensors one after the other, each aligned."""
        return _offsets(self)[1]

    def to_json(self) -> bytes:
        tensors = [[str(t.dtype).removeprefix("torch."), list(t.shape), t.has_gradient] for t in self.tensors]
        return json.dumps([self.tree, tensors]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> MessageForm:
        tree, tensors = json.loads(text)
        return cls(tree, tuple(TensorForm(_DTYPES[d], tuple(shape), bool(g)) for d, shape, g in tensors))

    @cached_property
    def gradients(self) -> MessageForm:
        """The message that goes back: the gradients of the tensors that have one."""
        tensors = tuple(TensorForm(t.dtype, t.shape, False, True) for t in self.tensors if t.has_gradient)
        return MessageForm(["tuple", [["tensor", index] for index in range(len(tensors))]], tensors)


def flatten(value: Any, where: str) -> tuple[MessageForm, list[torch.Tensor]]:
    """The structure and the tensors of what a stage returns.

    Args:
        where: names the stage in an error.

    Raises: UsageError: it holds something else than tensors, numbers, texts, None, tuples, lists and dicts of them.
    """
    tensors: list[torch.Tensor] = []
    tree = _tree_of(value, tensors, where, "output")
    forms = (
        TensorForm(t.dtype, tuple(t.shape), t.requires_grad and (t.is_floating_point() or t.is_complex()))
        for t in tensors
    )
    return MessageForm(tree, tuple(forms)), tensors


# A nested function that calls itself is a reference cycle: it would keep the tensors, with their graphs.
def _tree_of(item: Any, tensors: list[torch.Tensor], where: str, path: str) -> Any:
    """The structure of ``item``; its tensors are appended to ``tensors``."""
    if isinstance(item, torch.Tensor):
        if item.layout != torch.strided or item.dtype not in _DTYPES.values():
            raise _unsendable(where, path, f"a tensor of dtype {item.dtype}, layout {item.layout}")
        tensors.append(item)
        return ["tensor", len(tensors) - 1]
    if item is None or isinstance(item, bool | int | float | str):
        return ["value", item]
    if isinstance(item, tuple | list):
        kind = "tuple" if isinstance(item, tuple) else "list"
        return [kind, [_tree_of(part, tensors, where, f"{path}[{index}]") for index, part in enumerate(item)]]
    if isinstance(item, Documents):
        return ["documents", [item.begins, item.chunked_by]]
    if isinstance(item, Mapping) and all(isinstance(key, str) for key in item):
        return ["dict", [[key, _tree_of(part, tensors, where, f"{path}[{key!r}]")] for key, part in item.items()]]
    raise _unsendable(where, path, f"a {type(item).__name__}")


def unflatten(tree: Any, tensors: Sequence[torch.Tensor | None]) -> Any:
    """The value of which ``flatten`` gave the structure, or a part of it."""
    kind, content = tree
    if kind == "tensor":
        return tensors[content]
    if kind == "value":
        return content
    if kind == "documents":
        begins, chunked_by = (rows if rows is None else tuple(map(tuple, rows)) for rows in content)
        return Documents(begins or (), chunked_by)
    if kind == "dict":
        return {key: unflatten(part, tensors) for key, part in content}
    parts = [unflatten(part, tensors) for part in content]
    return tuple(parts) if kind == "tuple" else parts


def _unsendable(where: str, path: str, what: str) -> UsageError:
    return UsageError(
        f"{where} returns {what}, which cannot be sent to the next pipeline stage.",
        where=path,
        do="return tensors, numbers, texts and None, in tuples, lists and dicts with names as keys; or cut elsewhere.",
        code="pipeline-message",
    )


@dataclass
class Incoming:
    """A message that is being received."""

    form: MessageForm
    _buffer: torch.Tensor | None
    _work: Work | None
    _sent: MessageForm  # as it is on the way
    _codes: Sequence[RowBytes | None]  # of each tensor; None: it is sent as it is
    _device: torch.device

    def wait(self) -> list[torch.Tensor]:
        """The tensors, of their shapes, in memory of their own."""
        if self._buffer is None:
            return [torch.empty(t.shape, dtype=t.dtype, device=self._device) for t in self.form.tensors]
        assert self._work is not None
        self._work.wait()
        if len(self.form.tensors) == 1:
            received = [self._buffer.view(self._sent.tensors[0].shape)]
        else:
            received = unpacked(self._sent, self._buffer)
        return [
            values if codes is None else _decoded(codes, values, t)
            for values, codes, t in zip(received, self._codes, self.form.tensors, strict=True)
        ]


def _decoded(codes: RowBytes, received: torch.Tensor, form: TensorForm) -> torch.Tensor:
    out = torch.empty(form.shape, dtype=form.dtype, device=received.device)
    codes.decode(received, out.view(-1, form.shape[-1]))
    return out


def _offsets(form: MessageForm) -> tuple[list[int], int]:
    """Where each tensor of a message begins, and its end."""
    *offsets, end = accumulate((-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in form.tensors), initial=0)
    return offsets, end


def pack_into(form: MessageForm, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> torch.Tensor:
    """The tensors as the bytes of ``buffer``, uint8 of ``form.packed_nbytes``, which is returned."""
    for start, tensor, t in zip(_offsets(form)[0], tensors, form.tensors, strict=True):
        buffer[start : start + t.nbytes].view(t.dtype).copy_(tensor.detach().reshape(-1))
    return buffer


def unpacked(form: MessageForm, buffer: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of which ``pack_into`` made the bytes, as views of them."""
    parts = zip(_offsets(form)[0], form.tensors, strict=True)
    return [buffer[start : start + t.nbytes].view(t.dtype).view(t.shape) for start, t in parts]


class Channel:
    """Messages from and to the other stages of one pipeline.

    Args:
        comm: the ranks along ``pp``.
        gradients: the same ranks. Gradients are sent over it. NCCL runs what a communicator is given one after the
            other: with one for each direction no send waits behind a receive of the other direction.
        stages: of a dry run, whose messages have no values: what knows the structures; None: they are sent.
        wire: the format of activations that have a gradient, and of their gradients; None: as they are. Each row along
            the last dim is encoded by itself.
    """

    def __init__(
        self,
        comm: Communicator,
        gradients: Communicator,
        device: torch.device,
        stages: FakeStages | None = None,
        wire: WireFormat | None = None,
    ) -> None:
        self._comm, self._gradients = comm, gradients
        self._wire = wire
        self._device = device
        self._stages = stages
        self._known: dict[tuple[str, int], MessageForm] = {}  # by boundary and signature
        self.reset()

    def reset(self) -> None:
        """Forget the sends of a run."""
        self.sent: deque[Work] = deque()

    def known(self, boundary: str, signature: int) -> MessageForm | None:
        """The structure of messages over a boundary, once it is known."""
        return self._known.get((boundary, signature))

    def forget(self) -> None:
        """Negotiate every structure anew. All stages call it alike."""
        self._known.clear()

    def agree(self, boundary: str, signature: int, form: MessageForm, peer: int, *, label: str) -> None:
        """The sender's side: check the structure, or tell it to the receiver the first time.

        Raises: UsageError: an earlier micro-batch of this signature had another one.
        Communicates: the first time two sends of a few bytes.
        """
        known = self._known.get((boundary, signature))
        if known is None:
            self._tell((boundary, signature), form.to_json(), peer, label)
            self._known[boundary, signature] = form
        elif known != form:
            raise UsageError(
                f"a stage returned {_text(form)} where an earlier micro-batch of the same shapes gave {_text(known)}.",
                where=f"message {label}",
                do="give PipelineModule dynamic_shape=True where shapes depend on values; of another model, detach "
                "what blocks leave in attributes and no loss reads.",
                code="pipeline-shape",
            )

    def learn(self, boundary: str, signature: int, peer: int, *, label: str) -> MessageForm:
        """The receiver's side of ``agree``. Order: blocks the host the first time."""
        if (boundary, signature) not in self._known:
            text = self._ask((boundary, signature), peer, label)
            self._known[boundary, signature] = MessageForm.from_json(text)
        return self._known[boundary, signature]

    def _tell(self, key: tuple[str, int], text: bytes, peer: int, label: str) -> None:
        if self._stages is not None:
            self._stages.post(key, text)
            return
        for values, dtype in ([len(text)], torch.int64), (list(text), torch.uint8):
            part = torch.tensor(values, dtype=dtype, device=self._device)
            self._comm.blocking.send(part, peer, label=f"{label} structure")

    def _ask(self, key: tuple[str, int], peer: int, label: str) -> bytes:
        if self._stages is not None:
            return bytes(self._stages.take(key, f"the structure of {label}"))
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        self._comm.recv(size, peer, label=f"{label} structure").wait()
        num_bytes = int(size.item())
        self._comm.check()
        text = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._comm.recv(text, peer, label=f"{label} structure").wait()
        read = text.cpu().numpy().tobytes()
        self._comm.check()
        return read

    def _comm_of(self, form: MessageForm) -> Communicator:
        return self._gradients if form.tensors[0].is_gradient else self._comm

    def send(self, form: MessageForm, tensors: Sequence[torch.Tensor], peer: int, *, label: str) -> None:
        """Send tensors in one message. ``drain()`` the last work of ``sent`` before they are overwritten."""
        if not form.nbytes:
            return
        comm = self._comm_of(form)
        form, codes = self._on_the_way(form)
        tensors = [
            tensor if of is None else of.encode(tensor.detach().reshape(-1, tensor.shape[-1]), comm.empty)
            for tensor, of in zip(tensors, codes, strict=True)
        ]
        if len(tensors) == 1:
            flat = tensors[0].detach().contiguous().view(-1)
        else:
            flat = pack_into(form, tensors, torch.empty(form.packed_nbytes, dtype=torch.uint8, device=self._device))
        self.sent.append(comm.send(flat, peer, label=label))

    def recv(self, form: MessageForm, peer: int, *, label: str) -> Incoming:
        """Begin to receive a message."""
        sent, codes = self._on_the_way(form)
        if not form.nbytes:
            return Incoming(form, None, None, sent, codes, self._device)
        if len(form.tensors) == 1:
            only = sent.tensors[0]
            buffer = torch.empty(prod(only.shape), dtype=only.dtype, device=self._device)
        else:
            buffer = torch.empty(sent.packed_nbytes, dtype=torch.uint8, device=self._device)
        work = self._comm_of(form).recv(buffer, peer, label=label)
        return Incoming(form, buffer, work, sent, codes, self._device)

    def _on_the_way(self, form: MessageForm) -> tuple[MessageForm, list[RowBytes | None]]:
        """The structure of the encoded message, and how each tensor is encoded."""
        wire = self._wire
        codes = [
            RowBytes(wire, t.shape[-1], t.dtype, self._device)
            if wire is not None and t.is_activation and t.nbytes
            else None
            for t in form.tensors
        ]
        if not any(codes):
            return form, codes
        tensors = (
            t if of is None else TensorForm(torch.uint8, (prod(t.shape[:-1]), of.nbytes), False)
            for t, of in zip(form.tensors, codes, strict=True)
        )
        return MessageForm(form.tree, tuple(tensors)), codes


def _text(form: MessageForm) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in form.tensors) or "no tensor"


def signature_of(batch: Any, arguments: Mapping[str, Any]) -> int:
    """A number of the shapes and dtypes in a micro-batch and of the arguments with it, below 2**52; 0: no batch."""
    if batch is None:
        return 0
    parts = [f"{name}={value}" for name, value in arguments.items()]

    def visit(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            parts.append(f"{item.dtype}{list(item.shape)}{item.requires_grad}")
        elif isinstance(item, dict) or hasattr(item, "items"):
            for key, value in item.items():
                parts.append(f"{key}:")
                visit(value)
        elif isinstance(item, tuple | list):
            parts.append(f"({len(item)}")
            for value in item:
                visit(value)
        else:
            parts.append(type(item).__name__)

    visit(batch)
    return 1 + int.from_bytes(hashlib.sha256("|".join(parts).encode()).digest()[:6], "big")
