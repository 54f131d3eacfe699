"""Gradient accumulation: the sizes of a batch, the boundary of a step, and the losses of its micro-batches.

    loss is passed through                  and multiplied by                   gradients are then multiplied by
    engine.backward(loss)                   loss scale / accumulation steps     1 / loss scale
    engine.scale(loss), loss.backward()     loss scale / accumulation steps     1 / loss scale
    loss.backward() alone                   1                                   1 / accumulation steps

Without fp16 the loss scale is 1. With ``loss_reduction: "token"`` a micro-batch's loss, the mean over its tokens,
counts by their number. How many tokens the step has is known when all ranks have exchanged it:

    loss is multiplied by               gradients are then multiplied by
    loss scale x tokens / token unit    token unit x divisor of the ranks' sum / (loss scale x tokens of the step)

The token unit, a power of two near the mean number of tokens of the micro-batches so far, keeps gradients in the range
of means, so that a loss scale fits them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shoal.errors import AssertedUsageError, ConfigError, UsageError
from shoal.optim.loss_scale import LossScale

NumTokens = int | torch.Tensor


@dataclass
class Counters:
    """What one engine has done so far. A checkpoint saves these numbers."""

    global_steps: int = 0  # skipped steps included
    global_samples: int = 0  # over all ranks
    micro_steps: int = 0  # calls of step()
    skipped_steps: int = 0
    global_tokens: int = 0  # over all ranks, where they are counted


class Accumulation:
    """Counts the micro-batches of one engine's steps and scales their losses.

    >>> accumulation = Accumulation(micro_batch=4, num_micro=2, num_ranks=8)
    >>> accumulation.global_batch
    64
    >>> accumulation.is_boundary()
    False
    >>> accumulation.end_micro_batch(is_boundary=False)
    >>> accumulation.is_boundary()
    True
    >>> accumulation.set_global_batch(96)
    >>> accumulation.num_micro
    3

    Args:
        micro_batch: samples of one micro-batch of one rank.
        num_micro: micro-batches of one step (gradient accumulation steps).
        num_ranks: data-parallel ranks.
        loss_scale: of fp16; None: losses are not scaled.
        is_managed: False: the script accumulates by itself (``managed_gradient_accumulation``): every ``step()`` is a
            boundary. Losses are still divided by ``num_micro``.
        counts_tokens: losses count by their tokens.
        gradient_divisor: what the sum of the ranks' gradients is divided by.
    """

    def __init__(
        self,
        *,
        micro_batch: int,
        num_micro: int,
        num_ranks: int,
        loss_scale: LossScale | None = None,
        is_managed: bool = True,
        counts_tokens: bool = False,
        gradient_divisor: float = 1.0,
    ) -> None:
        self.micro_batch = micro_batch
        self.num_micro = num_micro
        self.num_ranks = num_ranks
        self.loss_scale = loss_scale
        self.is_managed = is_managed
        self.refuses_direct = False  # backward passes that the engine does not begin, as DeepSpeed at stage 0
        self.counts_tokens = counts_tokens
        self.counters = Counters()
        self.micro_in_step = 0  # micro-batches since the last boundary
        self.boundary: bool | None = None  # as set from outside; None: counted here
        self.has_backward = False  # since the last step
        self.losses: list[torch.Tensor] = []  # since the last step, before scaling
        self.scaled_by: set[str] = set()  # "engine", "scaled": how losses were scaled
        self.clip_norm = math.inf  # of this step, as asked for by ``clip_grad_norm_()``
        self._gradient_divisor = gradient_divisor
        self._tokens: list[torch.Tensor] = []  # of each loss, [] in fp64; empty: the script divides by their number
        self._token_unit = 1.0
        self._step_tokens: float | None = None  # of all ranks, once they are known
        self.mean_loss: float | None = None  # over this rank's micro-batches of the last step
        self.step_loss: float | None = None  # over those of all ranks
        self.is_loss_elsewhere = False  # another pipeline stage computes the losses of this step

    @property
    def num_open(self) -> int:
        """Micro-batches of the unfinished step, the one between backward() and step() included."""
        return max(self.micro_in_step, len(self.losses))

    # sizes

    @property
    def global_batch(self) -> int:
        """Samples of one step, over all ranks."""
        return self.micro_batch * self.num_micro * self.num_ranks

    def set_global_batch(self, total: int) -> None:
        """Change the number of micro-batches.

        Raises: UsageError: between backward() and step(). ConfigError: ``total`` does not divide by micro-batch x
            ranks.
        """
        if self.has_backward:
            raise UsageError(
                "set_train_batch_size() was called between backward() and step().",
                do="call it right after a step.",
                code="batch-size-mid-step",
            )
        per_micro = self.micro_batch * self.num_ranks
        if total <= 0 or total % per_micro:
            low = max(total // per_micro, 1) * per_micro
            raise ConfigError(
                f"train_batch_size {total} does not divide by micro-batch {self.micro_batch}"
                f" x data-parallel {self.num_ranks} = {per_micro}.",
                do=f"set it to {low} or {low + per_micro}.",
                code="batch-size",
            )
        self.num_micro = total // per_micro

    # the boundary

    def is_boundary(self) -> bool:
        """True if the optimizer steps after the current micro-batch."""
        if self.boundary is not None:
            return self.boundary
        return not self.is_managed or self.micro_in_step + 1 >= self.num_micro

    @contextmanager
    def boundary_now(self) -> Iterator[None]:
        """Inside the block the current micro-batch is the last of its step. A boundary set from outside stays."""
        is_set_here = self.boundary is None and not self.is_boundary()
        if is_set_here:
            self.boundary = True
        try:
            yield
        finally:
            if is_set_here:
                self.boundary = None

    def begin_pass(self) -> bool:
        """A backward pass begins. Returns: True if it is the last one before the step.

        Raises: UsageError: the engine did not begin it, and is not to allow that.
        """
        if self.refuses_direct and "engine" not in self.scaled_by:
            raise UsageError(
                "Direct calls to tensor.backward() are not supported at stage 0 with"
                " managed_gradient_accumulation=False, as DeepSpeed says.",
                do="call engine.backward(loss); or shoal.initialize, where loss.backward() works at every stage.",
                code="no-sync-deepspeed",
            )
        self.has_backward = True
        return self.is_managed and self.is_boundary()

    def num_micro_passed(self) -> int:
        """The micro-batches that one ``step()`` stands for.

        A client that sets the boundary itself calls ``step()`` once for all micro-batches of the step.
        """
        return 1 if self.boundary is None else max(1, len(self.losses))

    def end_micro_batch(self, *, is_boundary: bool, num_micro: int = 1) -> None:
        """Count ``num_micro`` micro-batches, and begin a new step after a boundary."""
        self.micro_in_step = 0 if is_boundary else self.micro_in_step + 1
        self.counters.micro_steps += 1
        self.counters.global_samples += num_micro * self.micro_batch * self.num_ranks

    # losses

    def scaled(
        self,
        loss: torch.Tensor,
        by: Literal["engine", "scaled"],
        *,
        is_averaged: bool = True,
        num_tokens: NumTokens | None = None,
    ) -> torch.Tensor:
        """Record ``loss`` and return it scaled for the backward pass.

        Args:
            by: "engine" for ``engine.backward()``, "scaled" for ``engine.scale()``.
            is_averaged: divide by the accumulation steps.
            num_tokens: of which ``loss`` is the mean.

        Raises: UsageError: ``num_tokens`` does not fit ``loss_reduction``, or the step's other losses.
        """
        self._check_tokens(num_tokens, is_averaged=is_averaged)
        if num_tokens is not None:
            if not self._tokens:
                self._token_unit = self._choose_token_unit()
            given = num_tokens.detach().reshape(()) if isinstance(num_tokens, torch.Tensor) else num_tokens
            # A number of the host becomes the argument of a kernel: copying it would block the host.
            self._tokens.append(torch.zeros((), dtype=torch.float64, device=loss.device).add(given))
        self.losses.append(loss.detach())
        self.scaled_by.add(by)
        if num_tokens is not None:
            loss = loss.float() * (self._tokens[-1] / self._token_unit).float()
        elif is_averaged and self.num_micro > 1:
            loss = loss / self.num_micro
        return loss if self.loss_scale is None else loss.float() * self.loss_scale.scale

    def loss_is_elsewhere(self, device: torch.device) -> None:
        """Another pipeline stage computes the loss of this micro-batch; gradients come from there, scaled."""
        self.is_loss_elsewhere = True
        self.scaled_by.add("engine")
        if self.counts_tokens:
            if not self._tokens:
                self._token_unit = self._choose_token_unit()
            self._tokens.append(torch.zeros((), dtype=torch.float64, device=device))

    @property
    def is_loss_known(self) -> bool:
        """True if every loss of the step was seen, on this rank or another."""
        return bool(self.losses) or self.is_loss_elsewhere

    def _check_tokens(self, num_tokens: NumTokens | None, *, is_averaged: bool) -> None:
        if num_tokens is not None and not self.counts_tokens:
            raise UsageError(
                'num_tokens was given, but loss_reduction is "mean": each micro-batch counts the same.',
                do='set "loss_reduction": "token" in the config, or leave num_tokens out.',
                code="loss-tokens",
            )
        if self.counts_tokens and num_tokens is None and is_averaged:
            raise UsageError(
                'loss_reduction is "token", but this loss came without its number of tokens.',
                do="call engine.backward(loss, num_tokens=n), where loss is the mean over n tokens"
                " (shoal.parallel.loss.count_tokens(labels)); or scale_wrt_gas=False, where the script has divided by"
                " the tokens of the step.",
                code="loss-tokens",
            )
        if self.losses and bool(self._tokens) != (num_tokens is not None):
            raise UsageError(
                "one step mixed losses with and without num_tokens.",
                do="give num_tokens with all losses of a step, or with none.",
                code="loss-tokens",
            )

    def _choose_token_unit(self) -> float:
        """The same on all ranks: from counters that are."""
        counters = self.counters
        mean = counters.global_tokens * self.micro_batch / max(counters.global_samples, 1)
        return 2.0 ** round(math.log2(mean)) if mean > 1 else 1.0

    def count_tokens(self, device: torch.device) -> torch.Tensor | None:
        """Those of this rank's micro-batches of the step. Shape: []; None: they are not counted."""
        if not self.counts_tokens:
            return None
        if not self._tokens:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([count.to(device) for count in self._tokens]).sum()

    def set_step_tokens(self, num_tokens: float | None) -> None:
        """The step has ``num_tokens`` over all ranks: they divide its gradients from now on. Counted once a step."""
        self.counters.global_tokens += int(num_tokens or 0) - int(self._step_tokens or 0)
        self._step_tokens = num_tokens

    def gradient_scale(self) -> float:
        """The factor that turns the accumulated gradients into the gradients of the step.

        With tokens it gives, as long as those of the other ranks are not known, gradients of the sum over tokens.
        """
        if not self.scaled_by:  # loss.backward() alone
            return 1.0 / self.num_micro
        scale = 1.0 if self.loss_scale is None else 1.0 / self.loss_scale.scale
        if not self._tokens:
            return scale
        return scale * self._token_unit * self._gradient_divisor / max(self._step_tokens or 1.0, 1.0)

    def compute_mean_loss(self) -> torch.Tensor | None:
        """The mean of the losses, by tokens if they are counted, where they are. Shape: [], fp32.

        The host does not wait for it.
        """
        if not self.losses:
            return None
        losses = torch.stack([loss.reshape(()).float() for loss in self.losses])
        if not self._tokens:
            return losses.mean()
        counts = torch.stack(self._tokens)
        return ((losses * counts).sum() / counts.sum().clamp(min=1)).float()

    def refuse_mixed(self, num_plain_passes: int) -> None:
        """Raises: UsageError: ``loss.backward()`` was used with ``engine.backward(loss)``, or where it cannot be.

        Args:
            num_plain_passes: passes of ``loss.backward()`` since the last step.
        """
        if num_plain_passes and self.counts_tokens and not self.scaled_by:
            raise UsageError(
                'loss_reduction is "token", and loss.backward() does not pass the number of tokens.',
                do="call engine.backward(loss, num_tokens=n), or engine.scale(loss, num_tokens=n).backward().",
                code="loss-tokens",
            )
        if num_plain_passes and self.loss_scale is not None and self.loss_scale.scale != 1.0 and not self.scaled_by:
            raise UsageError(
                "loss.backward() alone does not multiply the loss by fp16's loss scale"
                f" ({self.loss_scale.scale:g}), so small gradients become 0.",
                do="call engine.backward(loss), or engine.scale(loss).backward().",
                code="loss-scale",
            )
        if num_plain_passes and self.scaled_by == {"engine"}:
            raise UsageError(
                "one step mixed engine.backward(loss) and loss.backward(): they are scaled differently.",
                do="use one of them, or loss.backward() on engine.scale(loss).",
                code="mixed-backward",
            )

    def reset(self) -> None:
        """Discard the losses of the current step, after it was taken or given up. ``mean_loss`` is kept."""
        self.has_backward = self.is_loss_elsewhere = False
        self.clip_norm = math.inf
        self.losses.clear()
        self.scaled_by.clear()
        self._tokens.clear()
        self._step_tokens = None

    # checkpoints

    def own_state(self) -> dict[str, Any]:
        """The losses, and their tokens, of an unfinished step on this rank."""
        state = {"losses": [float(loss) for loss in self.losses], "styles": sorted(self.scaled_by)}
        if self._tokens:
            state |= {"tokens": [float(count) for count in self._tokens], "token_unit": self._token_unit}
        return state

    def load_own_state(self, saved: Mapping[str, Any], device: torch.device) -> None:
        """Restore what ``own_state`` returned, to continue the step."""
        self.has_backward = True
        self.losses = [torch.tensor(loss, dtype=torch.float32, device=device) for loss in saved["losses"]]
        self.scaled_by = set(saved["styles"])
        self._tokens = [torch.tensor(n, dtype=torch.float64, device=device) for n in saved.get("tokens", ())]
        self._token_unit = float(saved.get("token_unit", 1.0))

    def resume(self, own: Mapping[str, Any], num_done: int, device: torch.device) -> None:
        """Continue an unfinished step with the counters of another run, which were set meanwhile.

        Args:
            own: what ``own_state`` returned before.
            num_done: micro-batches of the step that were counted before.
        """
        self.load_own_state({**own, "token_unit": self._choose_token_unit()}, device)
        self.micro_in_step = num_done
        self.counters.micro_steps += num_done
        self.counters.global_samples += num_done * self.micro_batch * self.num_ranks


def check_for_backward(loss: Any) -> None:
    """Raises: UsageError: the loss is not one number that depends on a parameter."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UsageError(
            f"the loss must be one number, got {_shape(loss)}.", do="reduce it, e.g. loss.mean().", code="loss-shape"
        )
    if not loss.requires_grad:
        raise UsageError(
            "the loss does not depend on any parameter that is trained.",
            do="check torch.no_grad(), detach(), and requires_grad of the parameters.",
            code="loss-detached",
        )


def check_for_scale(loss: Any) -> None:
    """Raises: AssertedUsageError: the loss is not one number with a graph behind it."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise AssertedUsageError(
            f"scale() takes a loss that is a scalar tensor with a graph behind it, got {_shape(loss)}.",
            do="reduce it first, e.g. loss.mean(); for other tensors call tensor.backward(gradient).",
            code="loss-shape",
        )


def _shape(loss: Any) -> tuple[int, ...] | str:
    return tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
