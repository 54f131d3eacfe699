"""Where the ranks meet: the store of rank 0, and one interface for the sockets of the store, Gloo and NCCL.

1  before the ranks meet   the interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names, else that of the route to
                           rank 0's machine
2  they have met           on several machines: each rank connects to the next one, from its address to the other's
3  all could               both variables are set where they are not

The host name, which Gloo would take, often resolves to a loopback address, and NCCL would take any interface.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.comm.environment import Launch, chosen_interfaces, heartbeat_place, launcher_has_store, set_interface
from shoal.errors import CommError, ConfigError
from shoal.process import boot
from shoal.text import listed_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("shoal")

_LAUNCHER_SECONDS = 8.0  # for Shoal's launcher to end a rank of this machine that has not come, with its stack
_SILENT_SECONDS = 10.0  # after which a rank that waits for the others logs which ones
_CONNECT_SECONDS = 3.0
_LINGER_SECONDS = 1.0
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_VARIABLES = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Interface:
    """One that is up, and its address. ``name``: empty: it has another address than the kernel lists first."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} {self.address}".lstrip()

    @property
    def is_loopback(self) -> bool:
        return self.address == "::1" or self.address.startswith("127.")


def interfaces() -> list[Interface]:
    """Those of this machine, with their first IPv4 address, then IPv6 addresses of wide scope."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()))
                found.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != "20":  # of the link
                found.append(Interface(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found


def choose(host: str, port: int, mine: Sequence[Interface]) -> tuple[Interface | None, str]:
    """The interface for this rank's sockets, and the address of ``host`` as it is reached from here; sends nothing.

    Args:
        mine: the interfaces of this machine.

    Raises: ConfigError: a variable names an interface that this machine does not have.
    """
    route, peer = None, ""
    with suppress(OSError):  # there is no route yet
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(address)
            source, peer = way.getsockname()[0], way.getpeername()[0]
        route = next((each for each in mine if each.address == source), Interface("", source))
    gloo, nccl = chosen_interfaces()
    wanted = gloo or nccl
    if not wanted:
        return route, peer
    fitting = [each for each in mine if (each.name in gloo.split(",") if gloo else _is_of_nccl(each.name, nccl))]
    if not fitting:
        raise ConfigError(
            f"{'GLOO' if gloo else 'NCCL'}_SOCKET_IFNAME={wanted} names no interface of {socket.gethostname()} with an"
            " address.",
            do=f"name one of: {', '.join(map(str, mine))}.",
            code="comm-interface",
        )
    return route if route in fitting else fitting[0], peer


def _is_of_nccl(name: str, pattern: str) -> bool:
    """True if NCCL_SOCKET_IFNAME is for this interface: prefixes; ``=`` in front: whole names; ``^``: all others.

    >>> _is_of_nccl("eth0", "ib,eth"), _is_of_nccl("eth01", "=eth0"), _is_of_nccl("eth0", "^docker,lo")
    (True, False, True)
    """
    names = pattern.lstrip("^=").split(",")
    fits = name in names if "=" in pattern[:2] else name.startswith(tuple(names))
    return fits != pattern.startswith("^")


def own_address(host: str, port: int) -> str | None:
    """This machine's address for sockets of ranks that meet at ``host``; None: no route yet."""
    interface, _ = choose(host, port, interfaces())
    return None if interface is None else interface.address


@dataclass(frozen=True)
class _RankNetwork:
    """What a rank tells the others. ``port``: where it listens. ``has``: the interfaces of its machine."""

    host: str
    network: str
    name: str
    address: str
    port: int
    has: str


class CommonInterface:
    """One rank's part.

    Args:
        store: of this start alone. Every rank makes its object before it says that it is there.
        host: where rank 0 is.
    """

    def __init__(self, store: Store, rank: int, size: int, host: str, port: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._own = interfaces()
        self._interface, peer = choose(host, port, self._own)
        # The kernel completes connections before they are accepted, so no thread needs to wait for one.
        self._listener = socket.create_server(("", 0))
        network = boot()
        with suppress(OSError):
            network += f"/{os.stat('/proc/self/ns/net').st_ino}"  # a container's own
        mine = self._interface or Interface("", "")
        number, has = self._listener.getsockname()[1], ", ".join(map(str, self._own))
        self._mine = _RankNetwork(socket.gethostname(), network, mine.name, mine.address, number, has)
        store.set(f"interface/{rank}", json.dumps(asdict(self._mine)))
        if store.compare_set("network", "", network).decode() != network:
            store.set("networks", "several")
        if peer and not mine.is_loopback:
            store.set("first machine", peer)

    def close(self) -> None:
        self._listener.close()

    def settle(self) -> None:
        """Once all ranks are there, on several machines: check that the next rank is reached, and set the variables.

        Every rank calls; rank 0 logs the interface.

        Raises: CommError: some rank does not reach the next one; the same error on every rank.
        Communicates: through the store: two requests; on several machines five, and one more each quarter of a second.
        """
        store = self._store
        if not store.check(["networks"]):
            return
        # Where rank 0's name is a loopback address on its own machine, the others know a better one.
        first = store.get("first machine").decode() if store.check(["first machine"]) else ""
        mine = self._interface
        if mine is None or mine.is_loopback:
            mine = next((each for each in self._own if each.address == first), mine)
        next_rank = (self._rank + 1) % self._size
        theirs = _RankNetwork(**json.loads(store.get(f"interface/{next_rank}")))
        if theirs.network != self._mine.network and (fault := self._fault(mine, theirs, first)):
            own = f"rank {self._rank} on {self._mine.host} ({mine or 'no route'})"
            other = f"rank {next_rank} on {theirs.host} ({Interface(theirs.name, theirs.address)})"
            has = f"{self._mine.host} has {self._mine.has}; {theirs.host} has {theirs.has}"
            store.set("unreachable", json.dumps([f"{own} does not reach {other}: {fault}.", has]))
        store.add("checked", 1)
        pause, end = 0.01, time.monotonic() + 2 * _CONNECT_SECONDS
        while store.add("checked", 0) < self._size and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        if store.check(["unreachable"]):
            what, has = json.loads(store.get("unreachable"))
            if self._rank == 0:
                time.sleep(_LINGER_SECONDS)  # this process may have the store, which the others still read
            raise CommError(
                what,
                do=f"set {_VARIABLES} on each machine to an interface that the others reach, and let its ports through"
                f" the firewall: {has}.",
                code="comm-interface",
            )
        if mine is not None and mine.name:
            set_interface(mine.name)
        if mine is not None and self._rank == 0:
            logger.info("communication over %s (store, Gloo, NCCL)", mine)

    def _fault(self, mine: Interface | None, theirs: _RankNetwork, first: str) -> str:
        """Why the next rank's address is not reached from this one's; empty: it is."""
        loopback = Interface(theirs.name, theirs.address).is_loopback
        address = first if loopback else theirs.address
        if mine is None or mine.is_loopback:
            return "its own address is of no network"
        if not address or address == mine.address:
            return "the other address is of no network, or this machine's own"
        try:
            socket.create_connection((address, theirs.port), _CONNECT_SECONDS, (mine.address, 0)).close()
        except OSError as error:
            return f"{error.strerror or error}"
        return ""


def settle_in(store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Choose and check the interface of ranks whose process group the script has made. Every rank calls.

    Args:
        store: of these ranks alone. Where no server has it (a file), nothing is chosen.
        timeout: for all ranks to call.

    Raises: CommError: some rank does not reach the next one; the same error on every rank.
    Communicates: six requests to the store, and those of ``CommonInterface.settle``.
    """
    host, port = address_of(store)
    if host:
        with closing(CommonInterface(store, rank, size, host, port)) as common:
            if store.add("count", 1) == size:
                store.set("all", "")
            store.wait(["all"], timeout)
            common.settle()


def address_of(store: Store) -> tuple[str, int]:
    """Where a store's server listens; an empty host: it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", ""), getattr(store, "port", 0)


def meet(launch: Launch, host: str, port: int, seconds: float) -> Store:
    """The store of rank 0's process, or of torchrun's, once all ranks have connected to it. On several machines the
    interface for all other sockets is chosen.

    Raises: CommError: after ``seconds`` some ranks have not, which it names; or a rank does not reach the next one.
    Communicates: four requests to the store, and one more each half second.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore  # the launcher, which imports this, needs no torch

    began, pause, is_logged = time.monotonic(), 0.01, False
    is_env = launch.launcher == "env"
    source = "RANK and WORLD_SIZE in the environment" if is_env else f"launcher: {launch.launcher}"
    has_store = launch.rank == 0 and not (is_env and launcher_has_store())
    most = seconds + (0.0 if heartbeat_place() is None else _LAUNCHER_SECONDS)
    store: Any = None
    with ExitStack() as opened:
        while True:
            if store is None and (has_store or _is_reachable(host, port)):
                limit = timedelta(seconds=seconds)
                store = TCPStore(host, port, None, has_store, limit, wait_for_workers=False, multi_tenant=True)
                arrived: Any = PrefixStore(f"shoal/start/{store.add(f'shoal/starts/{launch.rank}', 1)}", store)
                common = CommonInterface(arrived, launch.rank, launch.world_size, host, port)
                opened.callback(common.close)
                arrived.append("ranks", f"{launch.rank} ")
                arrived.add("count", 1)
            try:
                if store is not None and arrived.add("count", 0) >= launch.world_size:
                    break
            except RuntimeError as error:
                raise CommError(
                    f"the store at {host}:{port} has ended while rank {launch.rank} waited for others",
                    do="look at the output of rank 0.",
                    code="comm-connection",
                ) from error
            waited = time.monotonic() - began
            if waited >= (most if is_logged else min(_SILENT_SECONDS, seconds)):
                others = range(1, launch.world_size) if store is None else map(int, arrived.get("ranks").split())
                missing = sorted({*range(launch.world_size)} - {*others})
                ranks = f"rank{'s' if len(missing) > 1 else ''} {listed_ranks(missing)}"
                what = f"{ranks} at {host}:{port} ({source})"
                if waited >= most:
                    if has_store:
                        time.sleep(1.0)  # for others to read who is missing
                    raise CommError(
                        f"rank {launch.rank} of {launch.world_size} has waited {seconds:g} s for {what}",
                        do=f"look at the output of {ranks}; start the missing ranks, or unset WORLD_SIZE to run alone."
                        " timeouts.init in the config, or init_distributed(timeout=...), sets the time.",
                        code="init-timeout",
                    )
                logger.warning("rank %d of %d waits for %s", launch.rank, launch.world_size, what)
                is_logged = True
            time.sleep(min(pause, max(0.0, most - waited)))
            pause = min(2 * pause, 0.5)
        common.settle()
        return PrefixStore("default_pg", store)  # as torch names it


def _is_reachable(host: str, port: int) -> bool:
    """True if a process listens there. A store's client would log each try with a stack."""
    try:
        socket.create_connection((host, port), 2.0).close()
    except OSError:
        return False
    return True
