"""How DeepSpeed's engine accumulates and reduces gradients, where that differs from Shoal's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from shoal.compat.sparse_tensor import SparseRows, gather_lengths, gather_parts
from shoal.engine.accumulation import NumTokens
from shoal.engine.engine import Engine
from shoal.errors import AssertedUsageError, NotBuiltError


class DeepSpeedGradients(Engine):
    """Backward passes, the blocks around them, and sums over the ranks under DeepSpeed's names."""

    follows_deepspeed = False  # as after deepspeed.initialize
    _is_averaging = True

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        num_tokens: NumTokens | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        loss = super().backward(loss, retain_graph, scale_wrt_gas, num_tokens, **kwargs)
        is_averaged = self.follows_deepspeed and scale_wrt_gas and num_tokens is None
        num_micro = self.gradient_accumulation_steps()
        return loss / num_micro if is_averaged and num_micro > 1 else loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        stage = self.zero_optimization_stage()
        if stage > 1:
            self._refuse(
                f"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {stage}",
                "use coalesce_grad_reduction(), or import shoal: under its own name no_sync() works at every stage.",
            )
        if self._is_in_block:
            self._refuse("no_sync context manager reentry is unsupported", "enter it once.")
        with super().no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        if not self.accumulation.is_managed:
            self._refuse(
                "coalesce_grad_reduction is not supported with managed_gradient_accumulation=False",
                "leave the block out: step() reduces what no backward pass has reduced.",
            )
        if self._is_in_block:
            self._refuse("coalesce_grad_reduction cannot be nested inside another no_sync context", "enter one block.")
        with super().coalesce_grad_reduction():
            yield

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        if self._is_in_block:
            self._refuse("It is illegal to call Engine.step() inside no_sync context manager", "step after the block.")
        super().step(lr_kwargs)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        if not self.accumulation.is_managed:
            self._refuse(
                "set_gradient_accumulation_boundary() is not supported with managed_gradient_accumulation=False",
                "leave the call out: every step() is a boundary.",
            )
        super().set_gradient_accumulation_boundary(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the optimizer steps after the current micro-batch.

        False under DeepSpeed's name with ``managed_gradient_accumulation: false``: only ``step()`` is a boundary.
        """
        is_unmanaged = self.follows_deepspeed and not self.accumulation.is_managed
        return not is_unmanaged and super().is_gradient_accumulation_boundary()

    @property
    def _is_in_block(self) -> bool:
        """True if the script calls from inside ``no_sync()`` or ``coalesce_grad_reduction()``."""
        return not self.sharded.reducer.is_syncing

    def _refuse(self, problem: str, do: str) -> None:
        """Raises: AssertedUsageError: after ``deepspeed.initialize``."""
        if self.follows_deepspeed:
            raise AssertedUsageError(f"{problem}, as DeepSpeed says.", do=do, code="no-sync-deepspeed")

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """End a backward pass that is open. Gradients are reduced during backward, or by ``step()``."""
        self._check_alive()
        self.sharded.finish_backward()

    @property
    def gradient_average(self) -> bool:
        """True if gradients are the mean over the ranks, as the configuration has it. Set to false: their sum, from
        the next backward pass on. Set it on every rank alike.
        """
        return self._is_averaging

    @gradient_average.setter
    def gradient_average(self, value: bool) -> None:
        self._is_averaging = bool(value)
        plan = self.plan.precision.gradient
        pre, post = (plan.pre_scale, plan.post_scale) if value else (1.0, 1.0)
        for group in self.sharding.groups:
            group.gradient.policy = replace(group.gradient.policy, pre_scale=pre, post_scale=post)

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Names of the weights whose gradients are reduced as sparse gradients."""
        return set(self.sharded.sparse_names)

    def all_gather_scalar(self, value: torch.Tensor, dp_group: Any = None) -> list[torch.Tensor]:
        """The tensors of all ranks, of one shape and dtype. Every rank calls.

        Raises: NotBuiltError: ``dp_group`` is not that of all data-parallel ranks.
        """
        lengths = [1] * self._size_of(dp_group)
        return [part[0] for part in gather_parts(self.axes.batch, value.unsqueeze(0), lengths)]

    def sparse_all_gather(self, value: torch.Tensor, dp_group: Any = None) -> list[torch.Tensor]:
        """The tensors of all ranks, whose first dimensions may differ. Every rank calls.

        Raises: NotBuiltError: as ``all_gather_scalar``.
        Communicates: 8 bytes for the lengths, and one all_gather of the longest.
        """
        self._size_of(dp_group)
        return gather_parts(self.axes.batch, value, gather_lengths(self.axes.batch, value))

    def sparse_allreduce(
        self, sparse: SparseRows, dp_group: Any = None, dp_world_size: float | None = None
    ) -> SparseRows:
        """Give a ``SparseTensor`` the rows of all ranks, divided by their number unless ``gradient_average`` is false.

        Returns: ``sparse``. Communicates: twice ``sparse_all_gather``.
        """
        size = self._size_of(dp_group) if dp_world_size is None else dp_world_size
        values = sparse.values / size if self._is_averaging else sparse.values
        sparse.indices = torch.cat(self.sparse_all_gather(sparse.indices, dp_group))
        sparse.values = torch.cat(self.sparse_all_gather(values, dp_group))
        return sparse

    def sparse_allreduce_bucket(
        self, bucket: Sequence[SparseRows], dp_group: Any = None, dp_world_size: float | None = None
    ) -> list[SparseRows]:
        """``sparse_allreduce`` of each."""
        return [self.sparse_allreduce(sparse, dp_group, dp_world_size) for sparse in bucket]

    def sparse_allreduce_no_retain(
        self, bucket: Sequence[SparseRows], dp_group: Any = None, dp_world_size: float | None = None
    ) -> None:
        """``sparse_allreduce`` of each; the results replace the gradients that the tensors were made from."""
        for sparse in self.sparse_allreduce_bucket(bucket, dp_group, dp_world_size):
            sparse.orig_dense_tensor.data = sparse.to_coo_tensor()

    def _size_of(self, dp_group: Any) -> int:
        if dp_group is not None and dp_group is not self.data_parallel_group:
            raise NotBuiltError(
                f"a group of {dp_group!r} is not the group of all data-parallel ranks.",
                do="leave dp_group out, or pass engine.data_parallel_group.",
            )
        return self.axes.batch.size
