"""The states of a process's default random generators: torch's, this device's, Python's and NumPy's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.comm.protocol import Communicator
from shoal.device import Device


def generator_states(device: Device) -> dict[str, Any]:
    """The states, by generator."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        **_torch_states(device),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
        "numpy": {
            "kind": kind,
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "rest": [position, has_gauss, float(cached)],
        },
    }


def set_generator_states(device: Device, saved: Mapping[str, Any]) -> None:
    """Set what ``generator_states`` returned."""
    _set_torch_states(device, saved)
    python = saved["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy = saved["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, *numpy["rest"]))


def share_generator_states(comm: Communicator, device: Device) -> None:
    """Give this rank's generators the states of the first rank.

    Ranks that hold the same activations must draw the same elements of them to drop, or the same layers.

    Communicates: some 20 KiB of each rank.
    """
    with unset_fake_temporarily():  # in a dry run, too, a state is a value
        own = generator_states(device)
    first = comm.gather_objects(_listed(own), label="random states")[0]
    if comm.rank:
        with unset_fake_temporarily():
            set_generator_states(device, _restored(first, own))


def _listed(state: Any) -> Any:
    """A tree whose tensors are lists."""
    if isinstance(state, dict):
        return {key: _listed(part) for key, part in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


def _restored(listed: Any, like: Any) -> Any:
    """The tree of which ``listed`` was made; ``like`` has tensors of the same dtypes in the same places."""
    if isinstance(like, dict):
        return {key: _restored(listed[key], part) for key, part in like.items()}
    return torch.tensor(listed, dtype=like.dtype, device="cpu") if isinstance(like, torch.Tensor) else listed


def _torch_states(device: Device) -> dict[str, torch.Tensor]:
    return {"torch": torch.get_rng_state(), **device.generator_states()}


def _set_torch_states(device: Device, states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    device.set_generator_states({key: value for key, value in states.items() if key == "cuda"})
