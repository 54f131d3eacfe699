"""The rendezvous of an elastic job's ranks, round after round: TorchElastic's c10d rendezvous, with two fixes.

TorchElastic caches the address of rank 0 in the first round. A machine that joins later waits forever for the address,
which no machine publishes in its round; and ranks would use a store that still has the last round's keys. Here rank 0's
machine publishes the address in each round, with a new port at which rank 0 listens itself.
"""

from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

NAME = "shoal"


class Rounds(RendezvousHandler):
    """Wraps TorchElastic's handler and publishes rank 0's address in each round."""

    def __init__(self, handler: RendezvousHandler, address: str | None) -> None:
        self._inner = handler
        self._address = address

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other machines."""
        info = self._inner.next_rendezvous()
        first = info.bootstrap_store_info
        if info.rank == 0 and first is not None:  # for machines that come now, whose handlers wait for it
            info.store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, first.master_addr)
            info.store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(first.master_port))
        mine = RendezvousStoreInfo.build(info.rank, PrefixStore("round", info.store), local_addr=self._address)
        return RendezvousInfo(info.store, info.rank, info.world_size, mine)

    @property
    def use_agent_store(self) -> bool:
        """False: rank 0 listens itself."""
        return False

    def get_backend(self) -> str:
        """The name."""
        return NAME

    def is_closed(self) -> bool:
        """True if the job is over."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """It is."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Machines that have come since the round began."""
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """The job's name."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Leave."""
        return self._inner.shutdown()


def make_rounds(parameters: RendezvousParameters) -> RendezvousHandler:
    """The handler of this machine."""
    backend, store = create_backend(parameters)
    return Rounds(create_handler(store, backend, parameters), parameters.local_addr)


def register() -> str:
    """Make it known to TorchElastic. Returns: the name by which it is."""
    rendezvous_handler_registry.register(NAME, make_rounds)
    return NAME
