"""Tokens that several ranks hold, as tensor-parallel ranks do: each takes its part of them to the experts.

So the ranks that hold one layer's tensors in parts hold different experts, and no token is computed twice. Source:
parallel folding (arXiv:2504.14960, section 3).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import pad

from shoal.comm import autograd
from shoal.comm.protocol import Communicator


def on_own_tokens(
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden: Tensor,
    expert_index: Tensor,
    weights: Tensor,
    comm: Communicator,
    label: str,
) -> Tensor:
    """Run a layer of experts on this rank's part of the tokens, and gather the outputs.

    Args:
        run: as ``run_experts``, of hidden, expert_index and weights.
        hidden, expert_index, weights: of all tokens, the same on all ranks of ``comm``.

    Returns: [tokens, out width], the same on all ranks.
    Communicates: an all-gather of the outputs; in backward, one of the gradients of ``hidden`` and one of ``weights``.
    """
    num_tokens = len(hidden)
    missing = -num_tokens % comm.size
    if missing:
        hidden, weights = pad(hidden, (0, 0, 0, missing)), pad(weights, (0, 0, 0, missing))
        expert_index = pad(expert_index, (0, 0, 0, missing), value=-1)
    own = expert_index.chunk(comm.size)[comm.rank]
    part = autograd.split(hidden, comm, label=f"{label} tokens")
    out = run(part, own, autograd.split(weights, comm, label=f"{label} weights"))
    return autograd.gather(out, comm, label=f"{label} outputs")[:num_tokens]
