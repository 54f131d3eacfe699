"""What an engine is: its configuration, ranks and batches, its rates and the last step's norm, for whoever asks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from shoal.engine.stored import StoredEngine
from shoal.errors import UsageError
from shoal.observe.ledger import Ledger, account

if TYPE_CHECKING:
    from shoal.device import Device
    from shoal.engine.settings import Plan
    from shoal.optim.loss_scale import LossScale
    from shoal.parallel.activations import HostActivations
    from shoal.parallel.recompute import Recompute
    from shoal.zero.bucket_state import BucketState
    from shoal.zero.step import ShardedStep


class EngineFacts(StoredEngine):
    """The part of ``Engine`` that says what it is. Nothing here communicates."""

    if TYPE_CHECKING:
        plan: Plan
        _device: Device
        _loss_scale: LossScale | None
        _norm: float | None
        _has_backward: bool
        _was_step_applied: bool
        _states: list[BucketState]
        _optimizer_step: ShardedStep | None
        recompute: Recompute | None
        activations: HostActivations | None

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was given."""
        return self._config_object.raw

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return self.world.local_rank

    @property
    def global_rank(self) -> int:
        """This rank's number among all."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.world.size

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks."""
        return self.axes.all.size

    @property
    def device(self) -> torch.device:
        """Where this rank computes: inputs go there."""
        return self._device.torch_device

    def train_batch_size(self) -> int:
        """Samples of one step, over all ranks."""
        return self._batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch of one rank."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one step."""
        return self._batch.num_micro

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the accumulation steps.

        Raises: ConfigError: it does not divide by micro-batch x data-parallel ranks. UsageError: in the middle of a
        step.
        """
        if self._has_backward:
            raise UsageError(
                "set_train_batch_size() was called between backward() and step().",
                do="call it right after a step.",
                code="batch-size-mid-step",
            )
        self._batch.set_total(train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch; the accumulation steps stay."""
        self._batch.micro = micro_batch_size

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.plan.zero.stage

    def gradient_clipping(self) -> float:
        """The largest norm that gradients keep; 0: any."""
        return self.plan.clip_norm

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [] if self.sharded_optimizer is None else [g.get("lr", 0.0) for g in self.sharded_optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm over all axes of the last step's gradients, before clipping; None before the first step."""
        return self._norm

    def was_step_applied(self) -> bool:
        """Did the last ``step()`` change the parameters?"""
        return self._was_step_applied

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by under fp16; 1 otherwise."""
        return self._loss_scale.scale if self._loss_scale is not None else 1.0

    @property
    def is_watched(self) -> bool:
        """Are changes an error that ``GatheredParameters`` would lose?"""
        return bool(self._config_object.zero_optimization.enable_sanity_checks)

    @property
    def bucket_states(self) -> list[BucketState]:
        """Every trainable bucket, in unit order."""
        return self._states

    def memory_report(self) -> Ledger:
        """Bytes by kind, tier and unit, beside what the allocator says."""
        saved = Counter({} if self.recompute is None else self.recompute.saved_bytes_by_tier())
        saved.update({} if self.activations is None else self.activations.saved_bytes_by_tier())
        moved = self.offloaded.ledger_kinds
        return account(self.sharded, self._states, self._optimizer_step, self._device, saved, moved)
