"""A connection to the next rank's process, which the kernel closes when that process ends, however it ends.

    rank 0 ---> rank 1 ---> rank 2 ---> ... ---> rank 0

Each rank watches the next one only: one connection a rank, no message, no request to the store after the start. A
process that is killed needs not do anything, and one that is only slow (a long call that holds the GIL, swapping) keeps
its connection, while a heartbeat would take it for dead. A machine that loses power or its network shows after
``_SILENT_SECONDS``, by TCP's keep-alive. ``close`` says goodbye, so that an orderly end is no failure.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import ClassVar

from torch._C._distributed_c10d import Store

_CONNECT_SECONDS = 5.0
_SILENT_SECONDS = 30
_GOODBYE = b"."


class NextRank:
    """This rank's end of two connections: to the next rank, and from the one before.

    Args:
        store: common to all ranks, for the addresses.
    """

    _open: ClassVar[weakref.WeakSet[NextRank]] = weakref.WeakSet()

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = (rank + 1) % size
        self._store = store
        self._is_over = False
        self._next: socket.socket | None = None
        self._listener = socket.create_server(("", 0))  # the kernel completes connections before they are accepted
        self._listener.setblocking(False)
        store.set(f"next/{rank}", f"{_own_address(store)} {self._listener.getsockname()[1]}")
        self._open.add(self)

    def has_ended(self) -> bool:
        """True if the next rank's process ended without closing its connection. Blocks for a few seconds at most."""
        if self._is_over:
            return False
        try:
            if self._next is None and self._store.check([key := f"next/{self.rank}"]):
                address, port = self._store.get(key).decode().split()
                self._next = _connect(address, int(port))
        except (OSError, RuntimeError):
            self._is_over = True  # not reachable, or the store has ended: this rank watches no other
        if self._next is None:
            return False
        try:
            goodbye = self._next.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            goodbye = b""
        self._is_over = True
        return goodbye != _GOODBYE

    def close(self) -> None:
        """Say goodbye and close both connections. Idempotent."""
        with contextlib.suppress(OSError):
            while True:
                with self._listener.accept()[0] as before:
                    before.send(_GOODBYE)
        self._forget()

    def _forget(self) -> None:
        self._is_over = True
        self._listener.close()
        if self._next is not None:
            self._next.close()

    @classmethod
    def forget_all(cls) -> None:
        """In a forked child, such as a data loader's worker: it would keep the connections open after its parent."""
        for each in list(cls._open):
            each._forget()


os.register_at_fork(after_in_child=NextRank.forget_all)


def _connect(address: str, port: int) -> socket.socket:
    connection = socket.create_connection((address, port), _CONNECT_SECONDS)
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS // 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS // 6)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return connection


def _own_address(store: Store) -> str:
    """This machine's address in the network of the store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((getattr(store, "host", "127.0.0.1"), getattr(store, "port", 1)))  # sends nothing
            return str(way.getsockname()[0])
    except OSError:
        return "127.0.0.1"
