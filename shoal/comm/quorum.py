"""The quorum of replicas that are jobs of their own: which of them take a step together.

A server that outlives every replica holds one connection to the first rank of each. A connection that is closed, as by
a killed process, or a member that is behind the others by the time-out, is left out.

    request   by                 answered when                      with
    hello     a new replica      enough have come; later at once    members: the run begins; or nothing: it has to join
    join      a new replica      the members commit a step          members of the next step, and who sends it the state
    arrive    a member           all members have asked             who sums: members, and who of them contributes
    vote      a member           all members have asked             commit, with the members of the next step; or,
                                                                    if one has failed, who sums again

Each request has the token of the job, SHOAL_QUORUM_TOKEN in the environment of all: a connection without it is closed.

A member that joined since the last commit contributes nothing to the step, unless it said so when it joined. Members
that died after a sum which all others have stay its contributors. Each set of members has a *generation*: a number that
names its connections.

Source: the lighthouse and the manager of torchft (github.com/meta-pytorch/torchft).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shoal.comm.failure import FailureReports, FirstError
from shoal.comm.fake import FakeCommunicator
from shoal.comm.gloo import GlooCommunicator, GlooPending
from shoal.comm.gloo_links import GlooLinks
from shoal.comm.protocol import Communicator
from shoal.comm.recorder import Recorder
from shoal.errors import CommError, ConfigError

Message: TypeAlias = dict[str, Any]

AXIS = "replicas"
DEFAULT_PORT = 29600
TIMEOUT_SECONDS = 300.0
_CONNECT_SECONDS = 60.0
_POLL_SECONDS = 0.005
_TICK_SECONDS = 1.0
_OPS = ("hello", "join", "arrive", "vote")


class _Replica:
    """A connection to one replica, as the server sees it."""

    def __init__(self, serial: int, number: int, connection: socket.socket) -> None:
        self.serial = serial  # of no other connection of the server
        self.number = number  # the lowest that was free: the order of members
        self.connection = connection
        self.received = b""
        self.request: Message = {}  # that is not answered yet
        self.asked_at = 0.0
        self.is_new = True  # joined since the last commit

    def asks(self, op: str) -> bool:
        return self.request.get("op") == op

    def answer(self, reply: Message) -> None:
        self.request = {}
        with contextlib.suppress(OSError):  # it has ended: the next read sees that
            self.connection.sendall(json.dumps(reply).encode() + b"\n")


class QuorumServer:
    """Answers replicas until ``close()``.

    Args:
        port: 0: one that is free.
        num_replicas: that the run begins with.
        timeout_seconds: after which a member that the others wait for is left out.
        token: that each request has to have; empty: none.
        log: gets a line for each replica that joins or is left out.
    """

    def __init__(
        self,
        port: int = DEFAULT_PORT,
        host: str = "127.0.0.1",
        *,
        num_replicas: int = 1,
        timeout_seconds: float = TIMEOUT_SECONDS,
        token: str = "",
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._listener = socket.create_server((host, port), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        opened = socket.create_server((host, 0), backlog=128)  # the store's own would listen at every address
        port = opened.getsockname()[1]
        self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=opened.detach())
        self._num_replicas = num_replicas
        self._timeout_seconds = timeout_seconds
        self._token = token.encode()
        self._log = log
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._replicas: list[_Replica] = []
        self._members: list[_Replica] = []
        self._contributors: list[int] = []  # of the sum that is voted on
        self._generation, self._group = 0, [-1]
        self._num_connections = 0
        self._is_closed = False

    def serve(self) -> None:
        """Answer until ``close()``, which another thread calls."""
        while not self._is_closed:
            for key, _ in self._selector.select(_TICK_SECONDS):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            self._leave_late_out()
        for replica in self._replicas:
            replica.connection.close()
        self._selector.close()
        self._listener.close()

    def close(self) -> None:
        self._is_closed = True

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_CONNECT_SECONDS)
        _keep_alive(connection)
        self._num_connections += 1
        taken = {replica.number for replica in self._replicas}
        number = min(set(range(len(taken) + 1)) - taken)
        replica = _Replica(self._num_connections, number, connection)
        self._replicas.append(replica)
        self._selector.register(connection, selectors.EVENT_READ, replica)

    def _read(self, replica: _Replica) -> None:
        try:
            data = replica.connection.recv(65536)
            *lines, replica.received = (replica.received + data).split(b"\n")
            if not data or len(replica.received) > 65536:
                raise ConnectionError("closed")
            for line in lines:
                request = json.loads(line)
                if not hmac.compare_digest(str(request["token"]).encode(), self._token):
                    raise ValueError("no token")
                if request["op"] not in _OPS or not isinstance(request["is_ok"], bool):
                    raise ValueError("no request")
                replica.request, replica.asked_at = request, time.monotonic()
        except (OSError, ValueError, TypeError, LookupError, RecursionError):  # closed, or no replica's
            self._leave_out(replica, "its connection was closed")
        self._decide()

    def _leave_out(self, replica: _Replica, why: str) -> None:
        if replica not in self._replicas:
            return
        self._selector.unregister(replica.connection)
        replica.connection.close()
        self._replicas.remove(replica)
        if replica in self._members:
            self._members.remove(replica)
            self._store.set(f"gone/{replica.serial}", "1")
            self._log(f"replica {replica.number} is left out: {why}; {len(self._members)} go on.")

    def _leave_late_out(self) -> None:
        waiting = [replica.asked_at for replica in self._members if replica.request]
        if waiting and time.monotonic() - min(waiting) > self._timeout_seconds:
            for replica in [replica for replica in self._members if not replica.request]:
                self._leave_out(replica, f"the others have waited {self._timeout_seconds:g} s for it")
            self._decide()

    def _decide(self) -> None:
        """Answer what can be answered."""
        new = [replica for replica in self._replicas if replica.asks("hello")]
        members = self._members
        if not members:
            for replica in self._replicas:
                if replica.asks("join"):
                    replica.answer({"error": "no replica is left that has the state of the run"})
            if len(new) >= self._num_replicas:
                self._begin(new)
            return
        for replica in new:
            replica.answer(self._about(replica))
        if all(replica.asks("arrive") for replica in members):
            self._sum(is_failed=not all(replica.request["is_ok"] for replica in members))
        elif all(replica.asks("vote") for replica in members):
            if all(replica.request["is_ok"] for replica in members):
                self._commit()
            else:
                self._sum(is_failed=True)

    def _about(self, replica: _Replica) -> Message:
        return {"serial": replica.serial, "store": self._store.port, "timeout": self._timeout_seconds, "members": []}

    def _begin(self, new: Sequence[_Replica]) -> None:
        self._members = sorted(new, key=lambda replica: replica.number)
        shared = self._shared()
        for replica in self._members:
            replica.is_new = False
            replica.answer(self._about(replica) | shared)
        self._log(f"the run begins with {len(self._members)} replicas.")

    def _shared(self, *, is_failed: bool = False) -> Message:
        """What all members are told; of other members than the last ones with a new generation."""
        serials = [replica.serial for replica in self._members]
        if is_failed or serials != self._group:
            self._generation, self._group = self._generation + 1, serials
        return {"members": serials, "generation": self._generation}

    def _sum(self, *, is_failed: bool) -> None:
        self._contributors = [replica.serial for replica in self._members if not replica.is_new]
        reply = self._shared(is_failed=is_failed) | {"contributors": self._contributors}
        for replica in self._members:
            replica.answer(reply)

    def _commit(self) -> None:
        old = self._members
        joining = [replica for replica in self._replicas if replica.asks("join")]
        self._members = sorted([*old, *joining], key=lambda replica: replica.number)
        sources = {replica.serial: old[index % len(old)].serial for index, replica in enumerate(joining)}
        reply = self._shared() | {
            "is_committed": True,
            "contributors": self._contributors,
            "sources": [[serial, source] for serial, source in sources.items()],
        }
        for replica in old:
            replica.is_new = False
        for replica in joining:
            replica.is_new = not replica.request["is_ok"]
        for replica in self._members:
            replica.answer(reply)
        for replica in joining:
            self._log(f"replica {replica.number} joins; {len(self._members)} go on.")


def _keep_alive(connection: socket.socket) -> None:
    """Notice within half a minute that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def address_of(text: str) -> tuple[str, int]:
    """Host and port. Raises: ConfigError: it is no ``host:port``.

    >>> address_of("node-0:29600")
    ('node-0', 29600)
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{text!r} is no host:port.", do='write such as "node-0:29600".', code="quorum-address")
    return host, int(port)


class Quorum:
    """One replica's connection to the server.

    Args:
        token: the server's.

    Raises: CommError: no server answers at the address for a minute.
    """

    def __init__(self, address: tuple[str, int], token: str = "") -> None:
        self._token = token
        deadline = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                self._connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise CommError(
                        f"no quorum server answers at {address[0]}:{address[1]}: {error}.",
                        do="start `shoal quorum`, and write its address to fault_tolerance.quorum.",
                        code="quorum-lost",
                    ) from error
                time.sleep(0.2)
        self._connection.settimeout(None)  # an answer takes as long as the slowest replica
        _keep_alive(self._connection)
        self._answers = self._connection.makefile("rb")

    def ask(self, op: str, **more: Any) -> Message:
        """Ask, and wait for the answer. Raises: CommError: the server has ended, or left this replica out."""
        try:
            self._connection.sendall(json.dumps({"op": op, "token": self._token, **more}).encode() + b"\n")
            line = self._answers.readline()
        except OSError:
            line = b""
        reply: Message = (
            json.loads(line)
            if line
            else {"error": "the quorum server ended, left this replica out, or has another SHOAL_QUORUM_TOKEN"}
        )
        if "error" in reply:
            raise CommError(
                f"{reply['error']}.",
                do="see the server's output. A replica that was left out joins when its job is started again; without"
                " a replica that has the state, start the jobs from a checkpoint.",
                code="quorum-lost",
            )
        return reply

    def close(self) -> None:
        self._answers.close()
        self._connection.close()


class ReplicaLink:
    """One rank's connections to the same rank of the other members, over Gloo. Tensors are in host memory.

    Args:
        host: of the server.
        about: what it answered to ``hello``.
        rank: in its replica.
    """

    def __init__(self, host: str, about: Message, rank: int) -> None:
        self._store = TCPStore(host, about["store"], is_master=False, wait_for_workers=False)
        self._rank = rank
        self.serial: int = about["serial"]  # of its replica
        self._timeout_seconds: float = about["timeout"]
        self._backend: GlooCommunicator | None = None
        self._comm: Communicator | None = None
        self.members: list[int] = []
        self.generation = 0

    @property
    def is_broken(self) -> bool:
        return self._comm is None

    @property
    def is_alone(self) -> bool:
        return len(self.members) == 1

    @property
    def comm(self) -> Communicator:
        """Raises: CommError: there are no connections, since opening them has failed."""
        if self._comm is None:
            raise CommError("this replica has no connection to the others.", code="quorum-lost")
        return self._comm

    def open(self, members: Sequence[int], generation: int) -> None:
        """Connect to ``members``, in this order, if it has not. All of them call.

        Raises: CommError: one of them was left out meanwhile, or did not come within the time-out.
        """
        if generation == self.generation:
            return
        self.drop()
        self.members, self.generation = list(members), generation
        index, size = self.members.index(self.serial), len(self.members)
        if self.is_alone:
            self._comm = Communicator(FakeCommunicator(AXIS, 0, 1), Recorder())
            return
        store = PrefixStore(f"{generation}/{self._rank}", self._store)
        self._meet(store)
        failures = FailureReports(store, index, look_up_seconds=0.0)  # the server says who is gone
        links = GlooLinks(store, index, self._timeout_seconds)
        pending = GlooPending(FirstError())
        self._backend = GlooCommunicator(AXIS, links, range(size), 1, failures, pending, is_mesh=True)
        self._comm = Communicator(self._backend, Recorder())

    def _meet(self, store: Store) -> None:
        """Wait for all members, so that no connection is waited for whose other end is gone."""
        store.set(f"here/{self.serial}", "1")
        deadline = time.monotonic() + self._timeout_seconds
        while not store.check([f"here/{serial}" for serial in self.members]):
            gone = [serial for serial in self.members if self._store.check([f"gone/{serial}"])]
            if gone or time.monotonic() > deadline:
                raise CommError(f"{len(gone) or 'some'} of {len(self.members)} replicas ended.", code="quorum-lost")
            time.sleep(_POLL_SECONDS)

    def drop(self) -> None:
        """Close the connections, although calls may be under way: who waits for this replica gets an error."""
        if self._backend is not None:
            self._backend.abandon()
        self._backend = self._comm = None
