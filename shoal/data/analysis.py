"""Measures of every sample of a data set, written to files by which a curriculum chooses samples.

    SAVE_PATH/METRIC/METRIC_sample_to_metric                     of each sample its value
                     METRIC_index_to_metric, _index_to_sample    the values, ascending; of each the samples that have it
                     METRIC_index_to_sample_percentile_merged    the same in about 100 rows
                     METRIC_metric_value                         of ``accumulate_value_over_samples``: the sum

Names of arguments and files are DeepSpeed's. The folder of a metric has one more file for each worker, which
``run_reduce`` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, default_collate

from shoal.data.metric_files import Rows, smallest_dtype, write_rows
from shoal.data.sources.token_file import TokenFile
from shoal.errors import UsageError

SINGLE, ACCUMULATE = "single_value_per_sample", "accumulate_value_over_samples"
Metric = Callable[[Any], Any]


class DataAnalyzer:
    """Computes metrics of a part of a data set (``run_map``) and merges the parts (``run_reduce``).

    Args:
        dataset: with a length and indices.
        num_workers, worker_id: parts of the data set, and which of them this process has.
        num_threads: processes that read samples and compute metrics.
        metric_names, metric_functions, metric_types: of each metric. A function gets a batch, as ``collate_fn`` makes
            it, and returns integers: one for each sample (``single_value_per_sample``), or a sum of fixed size over
            the batch's samples (``accumulate_value_over_samples``).
        metric_dtypes: of the functions' results; empty: whatever integers they return.
        save_path: folder of the results.
        collate_fn: makes a batch of a list of samples; torch's default where None.
        sample_indices: numbers of the samples, where the data set is in another order. A batch that is a dict with
            ``index`` says the numbers itself.
        barrier: called after each of the two phases; None: the caller makes workers wait for each other.

    Raises: UsageError: lists of unequal lengths, a type of metric that does not exist, or arguments of DeepSpeed that
        are not here (functions in place of the two phases).
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Metric] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str | Path = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Any = None,
        custom_map_update: Any = None,
        custom_map_finalize: Any = None,
        custom_reduce: Any = None,
        sample_indices: Sequence[int] | None = None,
        *,
        barrier: Callable[[], None] | None = None,
    ) -> None:
        given = [custom_map_init, custom_map_update, custom_map_finalize, custom_reduce, *specific_threads]
        if any(each is not None for each in given):
            raise UsageError(
                "DataAnalyzer takes no functions in place of its phases, and no specific_threads.",
                do="write a metric function; num_workers and worker_id divide the data set.",
                code="analysis",
            )
        lengths = {len(metric_names), len(metric_functions), len(metric_types), len(metric_dtypes) or len(metric_names)}
        wrong = sorted(set(metric_types) - {SINGLE, ACCUMULATE})
        if len(lengths) > 1 or wrong or not metric_names:
            what = f"metric_types {wrong}" if wrong else "no metrics, or names, functions, types of unequal numbers"
            raise UsageError(
                f"DataAnalyzer got {what}.",
                do=f"give for each metric a name, a function and one of the types {SINGLE}, {ACCUMULATE}.",
                code="analysis",
            )
        self.dataset, self.save_path = dataset, Path(save_path)
        self.num_workers, self.worker_id = num_workers, worker_id
        self.num_threads, self.num_threads_reduce = num_threads, num_threads_reduce
        self.batch_size, self.collate_fn, self.sample_indices = batch_size, collate_fn, sample_indices
        self.metric_names, self.metric_functions = list(metric_names), list(metric_functions)
        self.metric_types, self.metric_dtypes = list(metric_types), list(metric_dtypes)
        self._barrier = barrier if barrier is not None else lambda: None

    def run_map(self, progress: Callable[[int], None] = lambda done: None) -> None:
        """Compute this worker's part and write it.

        Args:
            progress: gets the number of samples that are done, after each batch.

        Raises: UsageError: a metric function returns something else than its type says.
        """
        first, stop = np.linspace(0, len(self.dataset), self.num_workers + 1, dtype=int)[
            [self.worker_id, self.worker_id + 1]
        ]
        numbers: list[np.ndarray] = []
        found: list[list[np.ndarray]] = [[] for _ in self.metric_names]
        done = 0
        for samples, values in self._batches(int(first), int(stop)):
            numbers.append(samples)
            for kind, value, of_metric in zip(self.metric_types, values, found, strict=True):
                if kind == ACCUMULATE and of_metric:
                    of_metric[0] = of_metric[0] + value
                else:
                    of_metric.append(value)
            done += len(samples)
            progress(done)
        for name, values in zip(self.metric_names, found, strict=True):
            folder = self.save_path / name
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / f"worker{self.worker_id}_values.npy", _joined(values))
            np.save(folder / f"worker{self.worker_id}_samples.npy", _joined(numbers))

    def _batches(self, first: int, stop: int) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """For each batch the samples' numbers, and the value of each metric."""
        loader = DataLoader(
            Subset(self.dataset, range(first, stop)),
            batch_size=self.batch_size,
            num_workers=self.num_threads if self.num_threads > 1 else 0,
            collate_fn=self._measure,
        )
        for size, own, values in loader:
            numbers = np.arange(first, first + size)
            if own is not None:
                numbers = own
            elif self.sample_indices is not None:
                numbers = np.asarray(self.sample_indices)[numbers]
            first += size
            yield numbers, values

    def _measure(self, samples: list[Any]) -> tuple[int, np.ndarray | None, list[np.ndarray]]:
        """A batch's size, the numbers that it has of its own, and the value of each metric. In a worker's process."""
        batch = (self.collate_fn or default_collate)(samples)
        own = np.asarray(batch["index"]).reshape(len(samples)) if isinstance(batch, dict) and "index" in batch else None
        values = []
        for number, (name, function) in enumerate(zip(self.metric_names, self.metric_functions, strict=True)):
            value = np.asarray(function(batch))
            wanted = self.metric_dtypes[number] if self.metric_dtypes else value.dtype
            expected = np.dtype(str(wanted).removeprefix("torch.") if isinstance(wanted, torch.dtype) else wanted)
            is_single = self.metric_types[number] == SINGLE
            if value.dtype.kind not in "iu" or value.dtype != expected or (is_single and value.size != len(samples)):
                raise UsageError(
                    f"the function of metric {name!r} returned {value.dtype} of shape {list(value.shape)} for"
                    f" {len(samples)} samples; {self.metric_types[number]} of {expected} were expected.",
                    do="return integers: one for each sample, or a sum over them.",
                    code="analysis",
                )
            values.append(value.reshape(-1))
        return len(samples), own, values

    def run_reduce(self) -> None:
        """Merge the parts of all workers.

        Raises: UsageError: the part of a worker is missing, or the parts do not cover the data set.
        """
        for name, kind in zip(self.metric_names, self.metric_types, strict=True):
            values = self._parts(name, "values")
            target = str(self.save_path / name / name)
            if kind == ACCUMULATE:
                total = np.stack(values).astype(np.int64).sum(axis=0).reshape(-1)
                write_rows(
                    f"{target}_metric_value",
                    total,
                    np.array([len(total)]),
                    smallest_dtype(int(total.min()), int(total.max())),
                )
            else:
                _write_single(
                    target, np.concatenate(self._parts(name, "samples")), np.concatenate(values), len(self.dataset)
                )

    def _parts(self, name: str, what: str) -> list[np.ndarray]:
        paths = [self.save_path / name / f"worker{worker}_{what}.npy" for worker in range(self.num_workers)]
        if missing := [path for path in paths if not path.is_file()]:
            raise UsageError(
                f"the analysis of metric {name!r} lacks {missing[0]}: a worker has not finished.",
                do=f"run all of the {self.num_workers} workers first.",
                code="analysis",
            )
        return [np.load(path, allow_pickle=False) for path in paths]

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Both phases: every worker calls it, and the first one merges."""
        self.run_map()
        self._barrier()
        if self.worker_id == 0:
            self.run_reduce()
        self._barrier()


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _write_single(target: str, samples: np.ndarray, values: np.ndarray, num_samples: int) -> None:
    if len(values) != num_samples:
        what = f"the parts of {target} have {len(values)} samples, and the data set has {num_samples}."
        raise UsageError(what, do="analyse the data again.", code="analysis")
    dtype = smallest_dtype(int(values.min()), int(values.max()))
    sample_dtype = smallest_dtype(0, num_samples - 1)
    write_rows(f"{target}_sample_to_metric", values, np.ones(num_samples, np.int64), dtype)
    order = np.argsort(values, kind="stable")
    distinct, counts = np.unique(values, return_counts=True)
    write_rows(f"{target}_index_to_metric", distinct, np.ones(len(distinct), np.int64), dtype)
    write_rows(f"{target}_index_to_sample", samples[order], counts, sample_dtype)
    together = max(1, len(distinct) // 100)
    merged = np.add.reduceat(counts, np.arange(0, len(counts), together))
    write_rows(f"{target}_index_to_sample_percentile_merged", samples[order], merged, sample_dtype)


def lengths_of(batch: Any) -> np.ndarray:
    """The metric ``seqlen``: tokens of each sample, [samples]. Batches are lists of samples."""
    return np.array([len(_tokens(sample)) for sample in batch], np.int64)


def counts_of(vocabulary: int) -> Metric:
    """The metric ``total_vocab_freq``: how often each token occurs, [vocabulary]."""

    def count(batch: Any) -> np.ndarray:
        counts = [np.bincount(_tokens(sample), minlength=vocabulary) for sample in batch]
        total: np.ndarray = np.stack(counts).astype(np.int64).sum(axis=0).reshape(-1)
        return total

    return count


def rarity_of(counts: np.ndarray) -> Metric:
    """The metric ``vocabularyrarity``: minus the sum of the logarithms of a sample's tokens' frequencies, rounded.

    Args:
        counts: as ``counts_of`` has found them.

    Source: Platanios et al. 2019 (arXiv:1903.09848), section 3.1.
    """
    costs = -np.log(np.maximum(counts, 1) / max(int(counts.sum()), 1))

    def rarity(batch: Any) -> np.ndarray:
        return np.array([round(float(costs[_tokens(sample)].sum())) for sample in batch], np.int64)

    return rarity


def _tokens(sample: Any) -> np.ndarray:
    """A sample's tokens: the sample; its first member; or its ``input_ids``."""
    if isinstance(sample, dict):
        sample = sample["input_ids"]
    elif isinstance(sample, tuple | list) and len(sample) and not np.isscalar(sample[0]):
        sample = sample[0]
    return np.asarray(sample).reshape(-1)


class SourceDocuments(torch.utils.data.Dataset[np.ndarray]):
    """The tokens of each document of a file."""

    def __init__(self, source: TokenFile) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.source.tokens(index)


def analyse_source(
    source: TokenFile,
    metrics: Sequence[str],
    save_path: str | Path,
    num_threads: int = 1,
    progress: Callable[[str, int], None] = lambda name, done: None,
) -> None:
    """Write the files of ``seqlen`` or ``vocabularyrarity`` of every document, the latter with ``total_vocab_freq``.

    Args:
        progress: gets a metric's name and the number of documents that are done.

    Raises: UsageError: a metric that does not exist.
    """
    if unknown := sorted(set(metrics) - {"seqlen", "vocabularyrarity"}):
        what = f"there is no metric {unknown[0]!r}."
        raise UsageError(what, do="write seqlen or vocabularyrarity; DataAnalyzer takes functions.", code="analysis")

    def run(name: str, function: Metric, kind: str) -> None:
        analyser = DataAnalyzer(
            SourceDocuments(source),
            num_threads=num_threads,
            batch_size=256,
            metric_names=[name],
            metric_functions=[function],
            metric_types=[kind],
            save_path=save_path,
            collate_fn=list,
        )
        analyser.run_map(lambda done: progress(name, done))
        analyser.run_reduce()

    if "seqlen" in metrics:
        run("seqlen", lengths_of, SINGLE)
    if "vocabularyrarity" in metrics:
        run("total_vocab_freq", counts_of(source.largest_token + 1), ACCUMULATE)
        counts = Rows(Path(save_path) / "total_vocab_freq" / "total_vocab_freq_metric_value").together()
        run("vocabularyrarity", rarity_of(counts), SINGLE)
