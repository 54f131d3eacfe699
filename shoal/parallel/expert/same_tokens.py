"""Tokens of tensor-parallel ranks. Where all hold the same, each takes its part of them to the experts.

So the ranks that hold one layer's tensors in parts hold different experts, and no token is computed twice. Source:
parallel folding (arXiv:2504.14960, section 3). Where these ranks split the sequence, and each expert too, all of them
need all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.comm import autograd
from shoal.comm.protocol import Communicator
from shoal.device import is_fake, read_vector
from shoal.errors import UsageError


def take_own_tokens(
    hidden: Tensor, expert_index: Tensor, weights: Tensor, comm: Communicator, label: str
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of tokens that all ranks of ``comm`` hold.

    Returns: hidden, expert_index and weights of the part. Parts are equal: tokens without an expert fill the last ones.
    Communicates: in backward, an all-gather of the gradients of ``hidden``, and one of ``weights``.
    """
    missing = -len(hidden) % comm.size
    if missing:
        hidden, weights = pad(hidden, (0, 0, 0, missing)), pad(weights, (0, 0, 0, missing))
        expert_index = pad(expert_index, (0, 0, 0, missing), value=-1)
    own = autograd.split(hidden, comm, label=f"{label} tokens")
    index = expert_index.chunk(comm.size)[comm.rank]
    return own, index, autograd.split(weights, comm, label=f"{label} weights")


def gather_outputs(out: Tensor, num_tokens: int, comm: Communicator, label: str) -> Tensor:
    """The outputs of all tokens, from those of each rank's part. Shape: [num_tokens, out width].

    Communicates: an all-gather.
    """
    return autograd.gather(out, comm, label=f"{label} outputs")[:num_tokens]


def gather_tokens(
    hidden: Tensor, expert_index: Tensor, weights: Tensor, comm: Communicator, label: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of all ranks of ``comm``, one rank's after the other's, as each of them needs: hidden, index, weights.

    Communicates: three all-gathers.
    """
    index = autograd.gather(expert_index, comm, label=f"{label} experts of tokens")
    tokens = autograd.gather(hidden, comm, label=f"{label} tokens")
    return tokens, index, autograd.gather(weights, comm, label=f"{label} weights")


def table_digest(expert_index: Tensor) -> Tensor:
    """A number that is different for different routing tables, except by a chance of 2^-53. Shape: [1], int64."""
    places = torch.arange(1, expert_index.numel() + 1, device=expert_index.device) * 0x1E3779B97F4A7C15
    factors = (places ^ (places >> 31)) * 0x3F58476D1CE4E5B9
    return ((expert_index.reshape(-1) + 2) * factors).sum().view(1)


def compare_tables(expert_index: Tensor, comm: Communicator, label: str) -> None:
    """Compare the routing tables of ranks that hold the same tokens and a part of each expert.

    Raises: UsageError: on every rank, if two tables differ.
    Communicates: an exchange of 8 bytes. Order: blocks the host.
    """
    if expert_index.is_meta or is_fake(expert_index):
        return
    every = comm.exchange(table_digest(expert_index), label=f"{label} tables").wait()
    digests = read_vector(every.flatten(), when_fake=0.0)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise _other_tables(f"ranks 0 and {other} of those that hold the parts of each expert", label)


def check_tables(digests: Sequence[int], comm: Communicator, same: Communicator) -> None:
    """Compare the routing tables of ranks that hold the same tokens.

    Args:
        digests: of each rank of ``comm``, the expert-parallel ranks. Ranks of ``same`` are neighbours among them.

    Raises: UsageError: on every rank of ``comm``, if two tables differ.
    """
    before = (same.rank - comm.rank) % same.size  # ranks of the first tensor-parallel group that are not in ``comm``
    for rank in range(1, comm.size):
        if (rank + before) % same.size and digests[rank] != digests[rank - 1]:
            raise _other_tables(f"expert-parallel ranks {rank - 1} and {rank}")


def _other_tables(ranks: str, label: str = "") -> UsageError:
    return UsageError(
        f"{ranks} are tensor-parallel ranks of the same tokens, and their routers chose different experts for them.",
        where=label,
        do="give tensor-parallel ranks the same seed, so that gates with noise or random choices draw the same"
        " numbers, and the same router and input.",
        code="expert-routing",
    )
