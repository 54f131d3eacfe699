"""A hash of what a sample or a batch holds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash

from shoal.device import is_fake

_MOST_PARTS = 64  # of a list or a dict
_MOST_ELEMENTS = 8192  # of an array, a text or bytes


def digest_of(value: Any, *, is_whole: bool = False) -> str:
    """A hash of the tensors, arrays, numbers and text in a value: of their types and sizes, and of their beginnings.

    >>> digest_of((torch.arange(3), {"label": 1})) == digest_of((torch.arange(3), {"label": 1}))
    True
    >>> digest_of([torch.arange(3)]) == digest_of([torch.arange(1, 4)])
    False

    What other objects hold is left out; it need not be the same in two processes.

    Args:
        is_whole: of all that they hold.
    """
    digest = xxhash.xxh3_64()
    _add(digest, value, (None, None) if is_whole else (_MOST_PARTS, _MOST_ELEMENTS))
    return digest.hexdigest()


def _add(digest: Any, value: Any, most: tuple[int | None, int | None]) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        digest.update(repr((tuple(value.shape), value.dtype)).encode())
        if value.layout is torch.strided and not value.is_meta and not is_fake(value.detach()):
            part = value.detach().flatten()[: most[1]].cpu().resolve_conj().resolve_neg().contiguous()
            digest.update(part.view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray):
        digest.update(repr((value.shape, value.dtype)).encode())
        if not value.dtype.hasobject:
            digest.update(value.reshape(-1)[: most[1]].tobytes())
    elif isinstance(value, Mapping):
        digest.update(repr(len(value)).encode())
        for key, part in islice(value.items(), most[0]):
            _add(digest, key, most)
            _add(digest, part, most)
    elif isinstance(value, list | tuple):
        digest.update(repr(len(value)).encode())
        for part in value[: most[0]]:
            _add(digest, part, most)
    elif isinstance(value, str | bytes):
        digest.update(repr((len(value), value[: most[1]])).encode())
    elif value is None or isinstance(value, bool | int | float | complex | np.generic):
        digest.update(repr(value).encode())
