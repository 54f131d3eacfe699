"""Micro-batches of as many samples as fit in a number of tokens, and the learning rate by the samples of each step.

Names are DeepSpeed's (``data_efficiency.data_sampling.dynamic_batching``). Unlike there the last sample is in a batch,
and the time is linear in the number of samples.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from shoal.data.analysis import SINGLE, DataAnalyzer
from shoal.data.loading import Loader
from shoal.data.metric_files import Rows
from shoal.errors import UsageError

logger = logging.getLogger("shoal")
_SECTION = "data_efficiency.data_sampling.dynamic_batching"


def batch_by_seqlens(
    seqlens: Sequence[int] | np.ndarray,
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[tuple[int, list[int]]], list[int], list[int]]:
    """Divide samples into micro-batches.

    Args:
        seqlens: tokens of each sample of the data set.
        max_tokens: most tokens of a micro-batch; longer samples are left out, with a warning.
        sequence_ids_per_mb: numbers of the samples to batch; None: all.
        min_batch_size, max_batch_size: samples of a micro-batch.
        sequence_picking_order: "dataloader": as they are; "random"; "seqlen": short ones first.
        effective_batch_size: micro-batches of a step, over all ranks; those at the end that fill no step are left out.
        required_microbatches_of_same_size: all micro-batches of a step have as many samples.
        verbose: log each step.
        seed: of the random order.

    Returns: of each micro-batch its step's number and its samples; of each step the samples, and the longest length.
    Raises: UsageError: the samples do not fill one step, or an order that does not exist.
    """
    if sequence_picking_order not in ("dataloader", "random", "seqlen"):
        what = f"sequence_picking_order {sequence_picking_order!r} does not exist."
        raise UsageError(what, do="write dataloader, random or seqlen.", code="by-tokens")
    numbers = range(len(seqlens)) if sequence_ids_per_mb is None else sequence_ids_per_mb
    samples = [(int(seqlens[number]), int(number)) for number in numbers]
    if sequence_picking_order == "random":
        random.Random(seed).shuffle(samples)
    elif sequence_picking_order == "seqlen":
        samples.sort()
    fitting = [sample for sample in samples if sample[0] <= max_tokens]
    if len(fitting) < len(samples):
        num = len(samples) - len(fitting)
        logger.warning("%d samples are left out, since each has more than max_tokens = %d tokens.", num, max_tokens)
    together = effective_batch_size if required_microbatches_of_same_size else 1
    micro_batches: list[list[tuple[int, int]]] = []
    first = 0
    while size := _largest(fitting, first, together, max_tokens, min_batch_size, max_batch_size):
        group = fitting[first : first + size * together]
        micro_batches += [group[number::together] for number in range(together)]
        first += size * together
    left = len(micro_batches) % effective_batch_size
    if len(micro_batches) < effective_batch_size:
        raise UsageError(
            f"{len(fitting)} samples give {len(micro_batches)} micro-batches of at most {max_tokens} tokens and at"
            f" least {min_batch_size} samples, and a step has {effective_batch_size}.",
            where=_SECTION,
            do="give more data, fewer tokens or a smaller min_batch_size.",
            code="by-tokens",
        )
    unused = len(fitting) - first + sum(map(len, micro_batches[len(micro_batches) - left :]))
    if unused:
        logger.info("%d samples at the end are left out, since they do not fill a step.", unused)
    steps = [
        micro_batches[first : first + effective_batch_size]
        for first in range(0, len(micro_batches) - left, effective_batch_size)
    ]
    if verbose:
        for number, step in enumerate(steps):
            tokens = [sum(length for length, _ in batch) for batch in step]
            logger.info("batch %d: %s samples, %s tokens", number, [len(batch) for batch in step], tokens)
    ids = [(number, [sample for _, sample in batch]) for number, step in enumerate(steps) for batch in step]
    return ids, [sum(map(len, step)) for step in steps], [max(max(batch)[0] for batch in step) for step in steps]


def _largest(
    samples: list[tuple[int, int]], first: int, together: int, max_tokens: int, least: int, most: int | None
) -> int:
    """The most samples from ``first`` on that each of ``together`` micro-batches, which take turns, can have."""
    tokens = [0] * together
    size = 0
    while first + (size + 1) * together <= len(samples) and (most is None or size < most):
        for number in range(together):
            tokens[number] += samples[first + size * together + number][0]
        if max(tokens) > max_tokens:
            break
        size += 1
    return size if size >= least else 0


def scale_lr(base_batch_size: int, batch_size: int, base_lr: float = 1, method: str | None = "linear") -> float:
    """The learning rate of a batch of ``batch_size`` samples.

    Args:
        method: "linear" (Goyal et al. 2017, arXiv:1706.02677), "sqrt" (Krizhevsky 2014, arXiv:1404.5997), "none".
    """
    ratio = batch_size / base_batch_size
    if method == "linear":
        return base_lr * ratio
    if method == "sqrt":
        return base_lr * math.sqrt(ratio)
    if method is None or method.lower() == "none":
        return base_lr
    raise UsageError(
        f"lr_scaling_method {method!r} does not exist.", do="write linear, sqrt or none.", code="by-tokens"
    )


class _Constant:
    """The learning rates of an optimizer as they are."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


class VariableBatchSizeLR:
    """A schedule of the learning rate whose rate of each step is scaled by the step's number of samples.

    Args:
        lr_scheduler: the schedule, for steps of ``base_batch_size`` samples.
        batch_sizes: samples of each step; after the last one they begin again.
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any = None,
        lr_scaling_method: str = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.base_lr_scheduler = lr_scheduler
        self.base_batch_size, self.batch_sizes = base_batch_size, list(batch_sizes)
        self.lr_scaling_method, self.verbose, self.dataloader = lr_scaling_method, verbose, dataloader
        self.last_epoch = max(last_epoch, 0)
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]  # unscaled
        self._scale()

    @property
    def optimizer(self) -> Any:
        """Whose learning rates are set."""
        return self.base_lr_scheduler.optimizer

    def get_lr(self) -> list[float]:
        """The scaled learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    get_last_lr = get_lr

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Go to the next step."""
        self._set(self.base_lrs)
        self.base_lr_scheduler.step(*args, **kwargs)
        self.base_lrs = self.get_lr()
        self.last_epoch += 1
        self._scale()

    def _scale(self) -> None:
        size = self.batch_sizes[self.last_epoch % len(self.batch_sizes)]
        self._set([scale_lr(self.base_batch_size, size, lr, self.lr_scaling_method) for lr in self.base_lrs])
        if self.verbose:
            logger.info("step %d: %d samples, learning rates %s", self.last_epoch, size, self.get_lr())

    def _set(self, lrs: Sequence[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """The place, and the schedule's own state."""
        return {
            "base_lr_scheduler": self.base_lr_scheduler.state_dict(),
            "last_epoch": self.last_epoch,
            "base_lrs": self.base_lrs,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved place."""
        self.base_lr_scheduler.load_state_dict(state_dict["base_lr_scheduler"])
        self.last_epoch, self.base_lrs = state_dict["last_epoch"], list(state_dict["base_lrs"])
        self._scale()


class _Batches(torch.utils.data.Dataset[Any]):
    """The samples of each micro-batch."""

    def __init__(
        self, dataset: Any, ids: list[tuple[int, list[int]]], pad: Callable[[Any, int], Any] | None, longest: list[int]
    ) -> None:
        self._dataset, self._ids, self._pad, self._longest = dataset, ids, pad, longest

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, number: int) -> list[Any]:
        step, samples = self._ids[number]
        found = [self._dataset[sample] for sample in samples]
        return found if self._pad is None else [self._pad(sample, self._longest[step]) for sample in found]


def get_dataloader_and_lr_scheduler_for_variable_batch_size(
    dataset: Any,
    dataset_seqlens: Sequence[int] | np.ndarray,
    max_tokens: int,
    effective_batch_size: int,
    dataset_filter_ids: Sequence[int] | None = None,
    lr_scaling_method: str = "linear",
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    dataloader_batch_size: int = 1,
    dataloader_rank: int = 0,
    dataloader_num_replicas: int = 1,
    dataloader_num_workers: int = 0,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_pin_memory: bool = False,
    lr_scheduler_or_optimizer: Any = None,
    required_microbatches_of_same_size: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[Loader, VariableBatchSizeLR, dict[str, Any]]:
    """This rank's loader of micro-batches by tokens, and the schedule that follows their sizes.

    Args:
        dataset_seqlens: tokens of each sample.
        effective_batch_size: micro-batches of a step, over all ranks: micro-batch x accumulation x ranks of the config.
        dataloader_batch_size: micro-batches by tokens that one batch of the loader joins.
        dataloader_rank, dataloader_num_replicas: this rank among the data-parallel ones.
        lr_scheduler_or_optimizer: whose learning rates are for ``effective_batch_size`` samples.
        required_microbatches_of_same_seqlen: pad with ``sample_padding_fn(sample, length)`` to the step's longest.

    Returns: the loader, the schedule, and the loader's arguments as DeepSpeed's ``deepspeed_io`` takes them.
    Raises: UsageError: see ``batch_by_seqlens``; or samples are to be padded, and there is no function for it.
    """
    if required_microbatches_of_same_seqlen and sample_padding_fn is None:
        what = "the micro-batches of a step must be equally long, and sample_padding_fn is missing."
        raise UsageError(what, do="pass a function of a sample and a length.", code="by-tokens")
    ids, sizes, longest = batch_by_seqlens(
        dataset_seqlens,
        max_tokens,
        dataset_filter_ids,
        min_batch_size,
        max_batch_size,
        sequence_picking_order,
        effective_batch_size,
        required_microbatches_of_same_size,
        verbose,
        seed,
    )
    batches = _Batches(dataset, ids, sample_padding_fn if required_microbatches_of_same_seqlen else None, longest)

    def collate(parts: list[list[Any]]) -> Any:
        samples = [sample for part in parts for sample in part]
        return samples if dataloader_collate_fn is None else dataloader_collate_fn(samples)

    loader = Loader(
        batches,
        dataloader_batch_size,
        rank=dataloader_rank,
        world_size=dataloader_num_replicas,
        shuffle=False,
        num_workers=dataloader_num_workers,
        collate_fn=collate,
        pin_memory=dataloader_pin_memory,
    )
    base = lr_scheduler_or_optimizer
    base = _Constant(base) if hasattr(base, "param_groups") else base
    schedule = VariableBatchSizeLR(base, effective_batch_size, sizes, loader, lr_scaling_method, verbose=verbose)
    arguments = {
        "dataset": batches,
        "batch_size": dataloader_batch_size,
        "pin_memory": dataloader_pin_memory,
        "data_sampler": DistributedSampler(batches, dataloader_num_replicas, dataloader_rank, shuffle=False),
        "collate_fn": collate,
        "num_local_io_workers": dataloader_num_workers,
    }
    return loader, schedule, arguments


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Sequence[int] | np.ndarray | None = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[Any], Any] | None = None,
) -> tuple[Loader, VariableBatchSizeLR, dict[str, Any]]:
    """The same with the values of the engine's config. The engine steps the returned schedule from now on.

    Args:
        dataset_seqlens: tokens of each sample; None: of the analysis in ``metrics_path``, which is made first with
            ``batch_seqlens_fn`` where it is missing.

    Raises: UsageError: the section is off, or there are no lengths.
    """
    sampling = engine.properties.config.data_efficiency.data_sampling
    section = sampling.dynamic_batching
    if not section.enabled:
        what = "batches by tokens were asked for, and the config has them off."
        raise UsageError(what, where=_SECTION, do="set enabled to true.", code="by-tokens")
    batch = engine.axes.batch
    if dataset_seqlens is None:
        dataset_seqlens = _lengths(dataset, section.metrics_path, engine, dataloader_collate_fn, batch_seqlens_fn)
    is_pipeline = engine.axes.get("pp") is not None
    made = get_dataloader_and_lr_scheduler_for_variable_batch_size(
        dataset,
        dataset_seqlens,
        section.max_tokens,
        engine.train_batch_size(),
        dataset_filter_ids,
        section.lr_scaling_method,
        section.min_batch_size,
        section.max_batch_size,
        section.sequence_picking_order,
        engine.train_micro_batch_size_per_gpu(),
        batch.rank,
        batch.size,
        sampling.num_workers,
        dataloader_collate_fn,
        sampling.pin_memory,
        engine.lr_scheduler if engine.lr_scheduler is not None else engine.optimizer,
        is_pipeline,
        is_pipeline,
        sample_padding_fn,
        section.verbose,
        engine.properties.config.data_efficiency.seed,
    )
    made[0].reads = not is_pipeline or engine.reads(has_forms=False)
    return made


def _lengths(
    dataset: Any, folder: str | None, engine: Any, collate: Any, measure: Callable[[Any], Any] | None
) -> np.ndarray:
    path = Path(folder or ".") / "seqlen" / "seqlen_sample_to_metric"
    if folder is None or (measure is None and not path.with_suffix(".idx").is_file()):
        raise UsageError(
            f"the samples' lengths are not known: there is no analysis {path}.",
            where=f"{_SECTION}.metrics_path",
            do="pass dataset_seqlens, or batch_seqlens_fn; or write the files with `shoal data analyse`.",
            code="by-tokens",
        )
    world = engine.axes.world
    if not path.with_suffix(".idx").is_file() and measure is not None:
        DataAnalyzer(
            dataset,
            world.size,
            world.rank,
            batch_size=1024,
            metric_names=["seqlen"],
            metric_functions=[measure],
            metric_types=[SINGLE],
            save_path=folder,
            collate_fn=collate,
            barrier=partial(world.barrier, label="analysis"),
        ).run_map_reduce()
    return Rows(path).together()
