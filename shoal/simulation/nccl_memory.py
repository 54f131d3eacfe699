"""Bytes of a GPU's memory that NCCL has for a communicator, outside of PyTorch's allocator.

    connection       buffers on this GPU
    from a neighbor  LL, LL128 and Simple: 0.5 + 4.7 + 4 MiB, allocated in pages of 2 MiB: 10 MiB
    to a neighbor    a page in the node; over the network what is sent is buffered, too

    collectives      connections of each channel
    all              of its ring: from the rank before, to the rank after
    all_reduce       of its tree, too: also from the rank after, to the rank before
    send; recv       to one peer of the node; from one. A rank of a ring, or of one direction of a pipeline, has no more
    all_to_all       to and from each peer of the node
    all of these     of as many channels as the next power of two has; over the network one buffer for all peers, in
                     each direction

Channels connect when they are first used.

Source: src/include/device.h, src/transport/p2p.cc and net.cc of NCCL 2.27; sizes as NVIDIA/nccl issue 1685 counts them
on eight H100s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_PAGE = 2 << 20
_BUFFERS = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + (4 << 20)  # LL, LL128, Simple
_RECEIVING = -(-_BUFFERS // _PAGE) * _PAGE
_NETWORK_SLOTS, _NETWORK_CHUNK = 16, 128 << 10
_DIRECT = frozenset(("send", "recv", "all_to_all"))


def communicator_nbytes(ops: Collection[str], ranks: Sequence[int], gpus_per_node: int, num_channels: int) -> int:
    """Of the communicator of ``ranks``, on each of them, once ``ops`` have been called.

    Args:
        num_channels: that collectives use on this machine.
    """
    if len(ranks) == 1:
        return 0
    nodes: dict[int, int] = {}
    for rank in ranks:
        nodes[rank // gpus_per_node] = nodes.get(rank // gpus_per_node, 0) + 1
    in_node = min(nodes.values())
    nbytes = 0
    if any(op not in _DIRECT for op in ops):
        ring = num_channels * (_RECEIVING + _PAGE)
        if len(nodes) > 1:  # a node's ring leaves it once for each channel
            ring += num_channels * (_RECEIVING - _PAGE) // in_node
        nbytes += ring * (2 if "all_reduce" in ops else 1)
    if direct := _DIRECT.intersection(ops):
        channels = 1 << (num_channels - 1).bit_length()
        if "all_to_all" in direct:
            nbytes += channels * (in_node - 1) * (_RECEIVING + _PAGE)
        elif in_node > 1:
            nbytes += channels * (_RECEIVING * ("recv" in direct) + _PAGE * ("send" in direct))
        if len(nodes) > 1:
            nbytes += 2 * channels * _NETWORK_SLOTS * _NETWORK_CHUNK
    return nbytes
