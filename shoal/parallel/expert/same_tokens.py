"""Tokens that several ranks hold, as tensor-parallel ranks do: each takes its part of them to the experts.

So the ranks that hold one layer's tensors in parts hold different experts, and no token is computed twice. Source:
parallel folding (arXiv:2504.14960, section 3).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from shoal.comm import autograd
from shoal.comm.protocol import Communicator


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
