"""Which device a rank uses: one of its own, from its local rank, and never one that another rank uses too.

1  the device that the process group is bound to (``init_process_group(device_id=...)``)
2  the current device, if the script has set one other than 0
3  the device with the number of the local rank, which the launcher sets; without that, of the rank among those with the
   same host name, by the store
4  the only device, if the launcher shows each rank one of its own

Then every rank with an accelerator registers its device in the store, and a second rank on one device is an error.
"""

from __future__ import annotations

import socket

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import is_gloo_available, is_nccl_available

from shoal.errors import ConfigError


def backends() -> list[str]:
    """The backends that torch was built with, of those that Shoal uses."""
    return [name for name, there in (("gloo", is_gloo_available()), ("nccl", is_nccl_available())) if there]


def accelerator(backend: str | None) -> torch.device | None:
    """The kind of accelerator that ``backend`` reaches; None: there is none, so that ranks use the CPU."""
    if backend not in (None, "nccl") and "cuda" not in str(backend):
        return None
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return current if current is not None and current.type == "cuda" else None


def device_of(local_rank: int | None, backend: str | None, bound: torch.device | None = None) -> torch.device:
    """This rank's device; see the module.

    Args:
        local_rank: None: this rank is alone, or its local rank is not known yet.
        bound: the device of the process group.

    Raises: ConfigError: there are fewer devices than ranks on this machine.
    """
    kind = accelerator(backend)
    if kind is None:
        return torch.device("cpu")
    if bound is not None and bound.type == kind.type and bound.index is not None:
        return bound
    current, count = torch.accelerator.current_device_index(), torch.accelerator.device_count()
    if local_rank is None or current != 0:
        return torch.device(kind.type, current)
    if local_rank < count:
        return torch.device(kind.type, local_rank)
    if count == 1:  # register_device() finds out whether it is the same one for several ranks
        return torch.device(kind.type, 0)
    raise ConfigError(
        f"local rank {local_rank} has no device of its own: this machine shows {count}",
        do=f"start at most {count} ranks on a machine, or set the device of each rank with torch.cuda.set_device.",
        code="rank-device",
    )


def local_rank_by_host(store: Store, rank: int, host: str | None = None) -> int:
    """The number of lower ranks with this rank's host name.

    Communicates: through ``store``, every lower rank's host name. Every rank has called :func:`publish_host`.
    """
    others = store.multi_get([_host_key(other) for other in range(rank)]) if rank else []
    own = (host or socket.gethostname()).encode()
    return sum(bytes(other) == own for other in others)


def publish_host(store: Store, rank: int, host: str | None = None) -> None:
    store.set(_host_key(rank), host or socket.gethostname())


def register_device(store: Store, rank: int, identity: str) -> None:
    """Register the device that this rank uses.

    Args:
        store: of this world alone.
        identity: of the device, such as its UUID; the same for all ranks that use it.

    Raises: ConfigError: another rank has registered the same one.
    """
    key = f"device/{socket.gethostname()}/{identity}"
    if store.add(key, 1) == 1:
        store.set(f"{key}/rank", str(rank))
        return
    other = store.get(f"{key}/rank").decode()
    raise ConfigError(
        f"ranks {other} and {rank} use the same device {identity} of {socket.gethostname()}",
        where=f"rank {rank}",
        do="start one rank a device, set LOCAL_RANK for each rank, or call torch.cuda.set_device before initialize.",
        code="rank-device",
    )


def identity_of(device: torch.device) -> str:
    """A name of the device that does not depend on the devices that this process sees."""
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", None) or device)


def _host_key(rank: int) -> str:
    return f"shoal/host/{rank}"
