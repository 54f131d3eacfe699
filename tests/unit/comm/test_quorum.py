"""Strangers that connect to the server of replicas: what they send ends their own connection, and nothing else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shoal.cli.app import quorum
from shoal.comm.quorum import Quorum, QuorumServer
from shoal.errors import CommError, UsageError
from shoal.launch.environment import passed_on

TOKEN = "secret"


@pytest.fixture
def server() -> Iterator[QuorumServer]:
    server = QuorumServer(0, timeout_seconds=30, token=TOKEN)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    yield server
    server.close()
    thread.join(10)
    assert not thread.is_alive()


def connected(server: QuorumServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


GARBAGE = {
    "bytes": b"\x16\x03\x01\x00\xff\xfe\n",
    "no object": b"[1, 2]\n",
    "nested": b"[" * 60_000 + b"\n",
    "oversized": b"x" * 200_000,
    "http": b"GET / HTTP/1.1\r\nHost: quorum\r\n\r\n",
    "no status": b'{"op": "join", "token": "secret"}\n',
    "another type": b'{"op": "join", "token": "secret", "is_ok": {}}\n',
    "no token": b'{"op": "hello", "is_ok": true}\n',
    "another token": b'{"op": "hello", "is_ok": true, "token": "secre"}\n',
    "number": b'{"op": 3, "token": "secret", "is_ok": true}\n',
}


def test_the_server_listens_to_this_machine_alone_unless_it_is_told_otherwise(server: QuorumServer) -> None:
    for port in (server.port, server._store.port):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        with pytest.raises(ConnectionRefusedError):  # Linux has a whole network of loopback addresses
            socket.create_connection(("127.0.0.2", port), timeout=10)


def test_garbage_half_a_line_and_strangers_stop_no_replica(server: QuorumServer) -> None:
    member = Quorum(("127.0.0.1", server.port), TOKEN)
    serial = member.ask("hello", is_ok=True)["serial"]
    slow = connected(server)
    slow.sendall(b'{"op": "ar')  # and no more
    strangers = [connected(server) for _ in GARBAGE]
    for each, sent in zip(strangers, GARBAGE.values(), strict=True):
        each.sendall(sent)
    for _ in range(2):
        assert member.ask("arrive", is_ok=True)["contributors"] == [serial]
        reply = member.ask("vote", is_ok=True)
        assert reply["is_committed"] and reply["members"] == [serial] and reply["sources"] == []
    for each in strangers:
        with each, suppress(ConnectionResetError):  # closed before all was read
            assert each.recv(1) == b""
    slow.close()
    member.close()
    stranger = Quorum(("127.0.0.1", server.port), "another")
    with pytest.raises(CommError, match="has another SHOAL_QUORUM_TOKEN"):
        stranger.ask("hello", is_ok=True)
    stranger.close()


def test_a_server_for_other_machines_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_QUORUM_TOKEN", raising=False)
    with pytest.raises(UsageError, match=r"\[quorum-token\] --host 0.0.0.0 without SHOAL_QUORUM_TOKEN"):
        quorum(2, host="0.0.0.0", port=0)
    monkeypatch.setenv("SHOAL_QUORUM_TOKEN", TOKEN)
    assert passed_on([]).get("SHOAL_QUORUM_TOKEN") is None  # it would be in what is submitted
