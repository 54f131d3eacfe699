"""On two or more GPUs of one node: products over symmetric memory have the bits of those whose parts are sent."""

from __future__ import annotations

import itertools
import os
import socket

import pytest
import torch
from torch import multiprocessing

from shoal.comm.parts import PartsCommunicator
from shoal.comm.world import current_world
from shoal.mesh import Mesh

pytestmark = pytest.mark.device

LENGTH, WIDTH, COLUMNS = 256, 512, (384, 128)  # of a rank's part of the sequence; of activations; of a rank's columns


def check_products(rank: int, size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.cuda.set_device(rank)
    world = current_world()
    device = torch.device("cuda", rank)
    comm = world.communicator("tp", Mesh.of(size, tp=size))
    symmetric = PartsCommunicator(comm, device)
    batches = PartsCommunicator(comm, device)
    batches._is_open = False
    torch.manual_seed(rank)
    for num_rows in (1, 2, 5):  # the second and the third enlarge the memory
        x = torch.randn(num_rows, LENGTH, WIDTH, device=device, dtype=torch.bfloat16)
        weights = [torch.randn(WIDTH, columns, device=device, dtype=torch.bfloat16) for columns in COLUMNS]
        torch.cuda._sleep(10_000_000 * rank)  # ranks are not at the same place
        whole, outputs = symmetric.all_gather_matmul(x, weights, label="gather")
        expected_whole, expected = batches.all_gather_matmul(x, weights, label="gather")
        assert torch.equal(whole, expected_whole)
        assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
        scattered = symmetric.matmul_reduce_scatter(outputs[0], weights[0].t(), label="scatter")
        assert torch.equal(scattered, batches.matmul_reduce_scatter(outputs[0], weights[0].t(), label="scatter"))
    world.close()


def test_products_over_symmetric_memory_have_the_bits_of_parts_that_are_sent() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs; there is {count}")
    size = min(count, 8)
    if not all(torch.cuda.can_device_access_peer(*pair) for pair in itertools.permutations(range(size), 2)):
        pytest.skip("the GPUs have no access to each other's memory")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(check_products, (size, port), nprocs=size)  # type: ignore[no-untyped-call]
