"""The sharded model as the engine uses it: passes, reduction, the update, and the end of both.

The engine reads and changes parameters, gradients and optimizer state through this file (and ``offload_states.py``,
``weights.py``, ``parameter_check.py``); nothing here holds the engine.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from contextlib import suppress

import torch
from torch import nn

from shoal.access.engine_parameters import EngineParameters
from shoal.checkpoint.local_shards import LocalShards
from shoal.engine.accumulation import Accumulation
from shoal.engine.parameter_check import ParameterCheck
from shoal.engine.settings import Properties
from shoal.errors import UsageError
from shoal.observe.ledger import Ledger, account
from shoal.running.runtime import ShardedModel
from shoal.running.status import GlobalStatus, refuse_unused, synchronize_status
from shoal.running.step import ShardedStep
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.placement import Tier
from shoal.streams import is_accelerator
from shoal.text import counted, listed

logger = logging.getLogger("shoal")


class Sharding:
    """One engine's parameters, gradients and optimizer state.

    Args:
        step: the optimizer on this rank's range; None: the engine has no optimizer.
        accumulation: has the factor that gradients in memory must be multiplied by.
    """

    def __init__(
        self,
        model: ShardedModel,
        step: ShardedStep | None,
        properties: Properties,
        accumulation: Accumulation,
    ) -> None:
        self.module = model.model
        self.model = model
        self.groups = model.trained_groups
        self.step = step
        self._plan = properties.plan
        self._axes = properties.axes
        self._device = properties.device
        self._is_scale_known = not accumulation.counts_tokens  # before the step's status is exchanged
        self._has_warned = False
        self.failure: Exception | None = None  # set when the state is no longer usable
        self.check = ParameterCheck(model)
        self.access = EngineParameters(
            model,
            step,
            accumulation.gradient_scale,
            self.check.follow,
            stage=properties.stage,
            checks_changes=bool(properties.config.zero_optimization.enable_sanity_checks),
        )
        overlaps = properties.config.zero_optimization.overlap_param_gather
        if overlaps == "auto":  # a CPU has no stream that gathers while it computes
            overlaps = is_accelerator(properties.device.torch_device)
        overlaps = overlaps and not model.sharded  # where parameters are sharded, only small ones are stored whole
        cpu_optimizer = None if step is None else step.cpu_optimizer
        has_waits = properties.axes.shard.size > 1 or cpu_optimizer is not None
        if overlaps and properties.stage in (1, 2) and has_waits:
            model.defer_gathers()
        if cpu_optimizer is not None:
            cpu_optimizer.likely_scale = accumulation.gradient_scale
            cpu_optimizer.is_likely = self._is_scale_known

    def wait(self) -> None:
        """Wait for pending updates; afterwards the state is as the last step left it, and may be modified."""
        self.model.release_kept()
        self.model.deferred.wait()
        if self.step is not None:
            self.step.synchronize()
            if self.failure is None:
                self.check.follow()

    # the step

    def reduce_all(self) -> None:
        """Reduce every gradient that no backward pass has reduced.

        Raises: UsageError: the script has assigned gradients, which would be added to the reduced ones.
        """
        assigned = [name for group in self.groups for name in group.gradient.assigned()]
        if assigned:
            raise UsageError(
                f"parameter.grad of {counted(len(assigned), 'parameter')} was assigned after backward(), but the engine"
                f" holds the reduced gradients: {listed(assigned)}.",
                do="call shoal.zero.safe_set_full_grad(parameter, value) on every rank.",
                code="grad-assigned",
            )
        self.check.follow()  # before the update overwrites what the script has changed
        self.model.reducer.complete_step()

    def synchronize_status(
        self, mean_loss: torch.Tensor | None, num_tokens: torch.Tensor | None = None, signal: int | None = None
    ) -> GlobalStatus:
        """Exchange norm, loss, overflow, missing gradients and the number of tokens.

        Communicates: one exchange of 4 to 6 numbers per rank; two more of a few bytes where a gradient is missing or
            late.
        """
        device = self._device.torch_device
        reducer = self.model.reducer
        return synchronize_status(self.groups, reducer, self._axes, device, mean_loss, num_tokens, signal)

    def refuse_unused(self, status: GlobalStatus, step: int) -> None:
        """Raises: UnusedParametersError: parameters got no gradient, and the config refuses that."""
        if not self._plan.ignores_unused:
            refuse_unused(status, step)

    def warn_without_gradients(self, status: GlobalStatus, step: int) -> None:
        """Warn once where a step has no gradient at all: the loss came from another model, or from a copy."""
        if self._has_warned or not status.has_grad or any(any(flags) for flags in status.has_grad.values()):
            return
        self._has_warned = True
        if self._axes.world.rank:
            return
        logger.warning(
            "step %d: the loss depends on no parameter of this engine, so nothing is trained. Compute it from"
            " the output of engine(...), not from a copy of the model or from another model.",
            step,
        )

    def update(self, status: GlobalStatus, gradient_scale: float, *, is_clipped: bool) -> None:
        """Run the optimizer on this rank's range, then gather the parameters where their placement asks for it.

        Args:
            gradient_scale: the gradients are multiplied by it.
        """
        step = self.step
        assert step is not None
        if step.cpu_optimizer is not None:
            step.cpu_optimizer.is_likely = self._is_scale_known and not is_clipped
        self.prepare_change()
        step.begin()
        try:
            with torch.no_grad():
                gathers = step.update(self.model.units, gradient_scale, status.has_grad)
                if not self.model.deferred.is_installed:
                    gathers += step.finish(self.model.units)
        except Exception as error:
            self.failure = error  # some units are a step ahead of the others
            raise
        finally:
            step.end()
        if self.model.deferred.is_installed:
            self.model.deferred.defer(gathers)
            return
        for _, work in gathers:
            work.drain()  # the script may change parameters in place after this

    def prepare_change(self) -> None:
        """Release every unit, and wait until no peer reads the shards: they may change then."""
        self.model.release_all()
        self.model.deferred.wait()
        self._axes.drain()

    def reset_gradients(self) -> None:
        """Discard the gradients of the current step."""
        if self.step is not None:
            self.step.drop_gradients()
        for group in self.groups:
            group.gradient.reset()
        self.model.num_plain_passes = 0

    def synchronize_tied(self, group: ParameterGroup) -> None:
        """Give the copies of a group that several pipeline stages have the values of the first of them.

        Communicates: where there are copies, a broadcast of this rank's range along their axis, and the gather of what
        is not sharded.
        """
        if not group.axes.across:
            return
        (tied,) = group.axes.across
        with group.resident(), group.buffer.storage.resident():
            own = group.main if group.is_trained else group.buffer.shard
            tied.blocking.broadcast(own, 0, label=group.buffer.label)
            if group.is_trained and group.has_own_main:
                group.buffer.shard.copy_(group.main)
        if not group.buffer.is_sharded and group.buffer.end - group.buffer.begin < group.buffer.layout.numel:
            group.update_replicas().wait()

    # all of the state

    def local_shards(self) -> LocalShards:
        """What this rank holds of the model and of the optimizer, for saving and loading."""
        return LocalShards(self.model, self.groups, self.step, self._axes)

    def local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of a gradient, without elements where it owns none; None without a gradient."""
        if not self.access.has_gradient(parameter):
            return None
        part = self.access.local_gradient(parameter)
        return torch.empty(0, dtype=torch.float32, device=parameter.device) if part is None else part

    def ledger(self, saved: Counter[Tier], offloaded: Collection[str]) -> Ledger:
        """Bytes by kind, tier and unit.

        Args:
            saved: bytes of activations that are kept for backward, by tier.
            offloaded: kinds that ``offload_states()`` moved to the host.
        """
        return account(self.model, self.step, self._device, saved, offloaded)

    # failure and end

    def recover(self) -> None:
        """After an exception: release every unit, discard gradients and pending updates."""
        self._drop_gradients()
        self.model.recover()
        self._drop_gradients()  # reductions that were under way have ended, and were sent to an optimizer on the host
        self.model.num_plain_passes = 0

    def _drop_gradients(self) -> None:
        if self.step is not None:
            with suppress(Exception):  # the first error counts; an update that failed fails the next step too
                self.step.drop_gradients()

    def stop_host_updates(self) -> None:
        """End the thread that updates on the host."""
        if self.step is not None and self.step.cpu_optimizer is not None:
            self.step.cpu_optimizer.close()

    def detach(self) -> None:
        """Remove all hooks and give the parameters memory of their own. Communicates: as ``ShardedModel.detach``."""
        try:
            self.model.recover()
            self.model.detach(is_failed=self.failure is not None)
        finally:
            self.model.disks.close()

    def free(self) -> None:
        """After ``detach``: free gradients and optimizer state."""
        if self.step is not None:
            self.step.free()
        for group in self.groups:
            group.gradient.free()
            group.gradient.sent.forget()
            group.ranges = []
        self.check.forget()
        self.groups.clear()
