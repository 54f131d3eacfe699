"""The data loader that ``initialize(training_data=...)`` returns."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from shoal.comm.protocol import Communicator
from shoal.config import Config
from shoal.data import Loader


def make_loader(
    dataset: Any,
    batch_size: int,
    comm: Communicator,
    config: Config,
    *,
    route: str = "train",
    pin_memory: bool = False,
    data_sampler: Any = None,
    collate_fn: Any = None,
    num_local_io_workers: int | None = None,
) -> Any:
    """A loader of this rank's micro-batches.

    Args:
        route: "train" shuffles; anything else keeps the order.
        data_sampler: decides what this rank reads; None: the samples are dealt out over the data-parallel ranks, at a
            position that resumes at any number of them.
    """
    if data_sampler is not None:
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory,
            drop_last=config.dataloader_drop_last,
        )
    return Loader(
        dataset,
        batch_size,
        rank=comm.rank,
        world_size=comm.size,
        seed=config.data.seed or 0,
        shuffle=route == "train",
        drop_last=config.dataloader_drop_last,
        collate_fn=collate_fn,
        num_workers=num_local_io_workers or 0,
        pin_memory=pin_memory,
    )
