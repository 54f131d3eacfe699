"""The interface of ranks on two hosts, which are network namespaces: chosen by the route, set, and checked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shoal.comm.interface import Interface, choose, interfaces
from shoal.errors import ConfigError

SCRIPT = """
import logging, os, time
import torch
from shoal.comm.world import init_distributed
from shoal.errors import CommError
from shoal.mesh import Mesh
logging.basicConfig(level=logging.INFO)
began = time.monotonic()
try:
    world = init_distributed(verbose=False)
except CommError as error:
    print(f"{time.monotonic() - began:.0f} s", error, flush=True)
else:
    total = torch.ones(2)
    world.communicator("dp", Mesh.of(world.size)).all_reduce(total, label="sum").wait()
    print("sum", total.tolist(), os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"], flush=True)
    world.close()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with a link (``up0`` and ``up1``) between them and each a ``lost0`` that leads nowhere."""
    if os.getuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root, ip and unshare (Debian: iproute2, util-linux)")
    names = [f"shoal{os.getpid()}n{number}" for number in range(2)]
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError:
                pytest.skip("this system does not make network namespaces")
        ip("link", "add", "up0", "netns", names[0], "type", "veth", "peer", "name", "up1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "link", "add", "lost0", "type", "veth", "peer", "name", "lost1")
            ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", f"up{number}")
            ip("-n", name, "address", "add", f"10.7{number + 8}.0.1/24", "dev", "lost0")
            for link in ("lo", "lost0", "lost1", f"up{number}"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


def run(hosts: list[str], *variables: dict[str, str], script: str = SCRIPT) -> list[str]:
    """What each rank prints, one on each host."""
    started = []
    for rank, (name, more) in enumerate(zip(hosts, variables, strict=True)):
        enter = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh"]
        values = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29577"}
        kept = {key: value for key, value in os.environ.items() if not key.endswith("_SOCKET_IFNAME")}
        environment = kept | values | {"MASTER_ADDR": "10.77.0.1"} | more
        command = [*enter, sys.executable, "-c", script]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return [each.communicate(timeout=100)[0] for each in started]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name_of_first", ["10.77.0.1", "127.0.1.1"])
def test_the_route_to_the_first_host_is_chosen_also_where_its_own_name_is_a_loopback_address(
    name_of_first: str, hosts: list[str]
) -> None:
    first, second = run(hosts, {"MASTER_ADDR": name_of_first}, {})
    assert "communication over up0 10.77.0.1 (store, Gloo, NCCL)" in first
    assert "sum [2.0, 2.0] up0 =up0" in first
    assert "sum [2.0, 2.0] up1 =up1" in second and "communication over" not in second


@pytest.mark.timeout(120)
@pytest.mark.parametrize("nccl", ["", "=lost0"])
def test_also_where_the_script_has_made_the_group_the_interface_is_chosen_and_checked(
    nccl: str, hosts: list[str]
) -> None:
    own = 'torch.distributed.init_process_group("gloo")\ndel os.environ["GLOO_SOCKET_IFNAME"]\ntry:\n    world'
    variables = [{"GLOO_SOCKET_IFNAME": f"up{rank}"} for rank in range(2)]
    variables[1] |= {"NCCL_SOCKET_IFNAME": nccl} if nccl else {}
    first, second = run(hosts, *variables, script=SCRIPT.replace("try:\n    world", own))
    if nccl:
        what = f"[comm-interface] rank 1 on {hosts[1]} (lost0 10.79.0.1) does not reach rank 0 on {hosts[0]} (up0"
        assert what in first and what in second
    else:
        assert first.count("communication over up0 10.77.0.1") == 1 and "communication over" not in second
        assert "sum [2.0, 2.0] up0 =up0" in first and "sum [2.0, 2.0] up1 =up1" in second


@pytest.mark.timeout(120)
def test_an_interface_without_a_way_to_the_other_host_is_named_by_both_ranks_at_once(hosts: list[str]) -> None:
    began = time.monotonic()
    said = run(hosts, {}, {"NCCL_SOCKET_IFNAME": "=lost0"})
    assert time.monotonic() - began < 90  # of 30 minutes
    for text in said:
        assert (
            f"[comm-interface] rank 1 on {hosts[1]} (lost0 10.79.0.1) does not reach rank 0 on {hosts[0]} (up0"
            " 10.77.0.1): " in text
        ), text
        assert f"{hosts[1]} has lo 127.0.0.1, " in text and "up1 10.77.0.2" in text
        assert int(text[text.index(" s [comm-interface]") - 2 : text.index(" s [comm-interface]")]) < 30


def test_a_variable_chooses_an_interface_and_one_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for pattern in ("lo", "=lo"):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", pattern)
        assert choose("127.0.0.1", 1, interfaces()) == (Interface("lo", "127.0.0.1"), "127.0.0.1")
    assert Interface("lo", "127.0.0.1") in interfaces()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME=none0 names no interface of .*\n.*lo 127\.0\.0\.1"):
        choose("127.0.0.1", 1, interfaces())
