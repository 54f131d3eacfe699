"""Saves the outputs of chosen operations of a recomputed segment, so that these operations do not run again.

    policy                      saved                                       recomputed
    "block"                     nothing                                     everything
    "matmul"                    outputs of matrix products and attention    norms, activations, dropout, additions
    ["aten::addmm", ...]        outputs of these operations                 everything else

Source: selective activation recomputation, section 5 of arXiv:2205.05198; torch's selective checkpoint contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from shoal.errors import ConfigError
from shoal.text import did_you_mean

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
ContextFn = Callable[[], Contexts]

_MATMUL = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::convolution",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)
_POLICIES: dict[str, tuple[str, ...]] = {"block": (), "matmul": _MATMUL}


def operations_of(policy: str | Iterable[str] | None) -> tuple[str, ...]:
    """The operations whose outputs a policy saves, by their names in torch.

    Raises: ConfigError: torch has no such operation, or there is no such policy.

    >>> operations_of(None), operations_of(["aten::mm", "bmm"])
    ((), ('aten::mm', 'aten::bmm'))
    """
    if policy is None:
        return ()
    if isinstance(policy, str):
        if policy not in _POLICIES:
            raise ConfigError(
                f"the recompute policy {policy!r} does not exist{did_you_mean(policy, _POLICIES) or '.'}",
                where="activation_checkpointing.policy",
                do=f"use {' or '.join(map(repr, _POLICIES))}, or a list of operations such as ['aten::addmm'].",
                code="recompute-policy",
            )
        return _POLICIES[policy]
    names = tuple(name if "::" in str(name) else f"aten::{name}" for name in policy)
    for name in names:
        if not torch._C._jit_get_schemas_for_operator(name):
            raise ConfigError(
                f"torch has no operation {name!r}.",
                where="activation_checkpointing.policy",
                do="name operations as torch does, e.g. 'aten::addmm'; torch.profiler shows which ones a model runs.",
                code="recompute-policy",
            )
    return names


def contexts_keeping(operations: Iterable[str]) -> ContextFn:
    """Makes, for each segment, the contexts of its forward and of its recomputation."""
    saved = frozenset(operations)

    def policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        schema = getattr(operation, "_schema", None)
        is_saved = schema is not None and schema.name in saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Contexts:
        forward, again = create_selective_checkpoint_contexts(policy)
        return forward, again

    return contexts
