"""Saves the outputs of chosen operations of a recomputed segment, so that these operations do not run again.

    policy                      saved                                       recomputed
    "block"                     nothing                                     everything
    "matmul"                    outputs of matrix products and attention    norms, activations, dropout, additions
    ["aten::addmm", ...]        outputs of these operations                 everything else

An operation that writes into a tensor of its caller (``out=``, ``add_``), returns a view, or draws random numbers
(attention with dropout) runs again in any case: its effect is more than its output. So does communication. Torch's own
contexts (``create_selective_checkpoint_contexts``) compare all operations of the two runs, and those of a rank that
waits for others differ; and they refuse outputs that the segment changes in place, which are copied here.
Source: selective activation recomputation, section 5 of arXiv:2205.05198.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shoal.errors import ConfigError, UsageError
from shoal.parallel.saved_tensors import input_changed, version_of
from shoal.text import did_you_mean

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
ContextFn = Callable[[], Contexts]

_MATMUL = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::_scaled_mm_v2",
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
    names = frozenset(operations)

    def contexts() -> Contexts:
        outputs: Outputs = defaultdict(list)
        return _Saving(names, outputs), _Reusing(names, outputs)

    return contexts


class _Output:
    """What one call of an operation returned, until the recomputation takes it."""

    def __init__(self, value: Any) -> None:
        leaves, self._form = tree_flatten(value)
        self._leaves: list[Any] | None = [_detached(each) for each in leaves]
        self._versions = [_version(each) for each in self._leaves]

    def copy_before_write(self, storages: set[int]) -> None:
        """Keep the values of what is about to be overwritten."""
        for index, leaf in enumerate(self._leaves or ()):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata in storages:
                assert self._leaves is not None
                self._leaves[index] = leaf.clone()
                self._versions[index] = _version(self._leaves[index])

    def take(self) -> Any:
        """Raises: UsageError: it was taken before, or changed in place after the segment ran."""
        if self._leaves is None:
            raise UsageError(
                "a second backward pass through a recomputed segment, and activation_checkpointing.policy saves"
                " outputs, which the first one has freed.",
                do="use policy 'block' with retain_graph=True.",
                code="recompute-policy-twice",
            )
        for leaf, version in zip(self._leaves, self._versions, strict=True):
            if _version(leaf) != version:
                raise input_changed(leaf)
        value, self._leaves = tree_unflatten(self._leaves, self._form), None
        return value


Outputs = defaultdict[Any, list[_Output]]  # of each operation, in the order of its calls


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, names: frozenset[str], outputs: Outputs) -> None:
        super().__init__()
        self._names = names
        self._outputs = outputs

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled functions inside a segment stay compiled

    def _is_saved(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        schema = getattr(operation, "_schema", None)  # a higher-order operation (flex_attention) has none
        if schema is None or schema.name not in self._names or schema.is_mutable:
            return False
        if any(each.alias_info for each in schema.returns):  # a view, which has to be one of the recomputed tensor
            return False
        if torch.Tag.nondeterministic_seeded not in operation.tags:
            return True
        defaults = {each.name: each.default_value for each in schema.arguments}
        return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}.get("dropout_p") == 0.0


@contextmanager
def unseen_by_policies() -> Iterator[None]:
    """Inside the block, what a recompute policy saves does not depend on the operations that run."""
    modes = []
    while isinstance(_get_current_dispatch_mode(), _POLICY_MODES):
        modes.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


class _Saving(_Mode):
    """In the forward pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if storages := _written(func, args, kwargs):
            for calls in self._outputs.values():
                for output in calls:
                    output.copy_before_write(storages)
        value = func(*args, **kwargs)
        if self._is_saved(func, args, kwargs):
            self._outputs[func].append(_Output(value))
        return value


class _Reusing(_Mode):
    """In the recomputation."""

    def __enter__(self) -> _Reusing:
        self._num_taken = Counter[Any]()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken, calls = self._num_taken[func], self._outputs[func]
        if taken == len(calls) or not self._is_saved(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        self._num_taken[func] += 1
        return calls[taken].take()


_POLICY_MODES = (_Mode, checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


def _written(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The storages that a call writes into."""
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    given = {**dict(zip([each.name for each in schema.arguments], args, strict=False)), **kwargs}
    written = [given.get(each.name) for each in schema.arguments if each.alias_info and each.alias_info.is_write]
    return {each.untyped_storage()._cdata for each in tree_leaves(written) if isinstance(each, torch.Tensor)}


def _detached(value: Any) -> Any:
    """The same memory and version counter, without the graph, which would keep itself alive."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, torch.Tensor) else 0
