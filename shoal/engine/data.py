"""The data loader that ``initialize(training_data=...)`` returns."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from shoal.comm.protocol import Communicator
from shoal.config import Config


class TrainingLoader:
    """Iterates over this rank's part of the data; each pass is shuffled anew, the same on every rank.

    ``len()`` is the number of micro-batches of one pass.
    """

    def __init__(self, loader: DataLoader[Any], sampler: DistributedSampler[Any] | None) -> None:
        self.loader = loader
        self.sampler = sampler
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        if self.sampler is not None:
            self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)

    @property
    def dataset(self) -> Any:
        return self.loader.dataset


def make_loader(
    dataset: Any,
    batch_size: int,
    comm: Communicator,
    config: Config,
    *,
    route: str = "train",
    pin_memory: bool | None = None,
    data_sampler: Any = None,
    collate_fn: Any = None,
    num_local_io_workers: int | None = None,
) -> TrainingLoader:
    """A loader of micro-batches. Without a sampler the samples are dealt out over the data-parallel ranks."""
    sampler = data_sampler
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(
            dataset,
            num_replicas=comm.size,
            rank=comm.rank,
            shuffle=route == "train",
            drop_last=config.dataloader_drop_last,
        )
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=num_local_io_workers or 0,
        pin_memory=bool(pin_memory),
        drop_last=config.dataloader_drop_last,
    )
    return TrainingLoader(loader, sampler if isinstance(sampler, DistributedSampler) else None)
