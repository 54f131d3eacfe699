"""Samples by difficulty: each step draws from those that are easy enough by one or several measures.

Each time that a difficulty grows, the samples that have become easy enough are a **cluster**, shuffled. A step draws
how many samples it takes from each cluster, by their sizes, takes the next ones of each, and shuffles them; a cluster
that has ended is shuffled again. All of it follows from the seed, as in DeepSpeed's ``DeepSpeedDataSampler``, so every
rank finds the same samples without communication, and with its seed they are DeepSpeed's.

The position is the state of the generator before the step, the place in each cluster, and the states of the generator
at which clusters were shuffled: from these a loaded position rebuilds them. No file is written.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.config.data_efficiency import CurriculumMetric, SampleCurriculum
from shoal.data.curriculum import CurriculumScheduler
from shoal.data.metric_files import Rows, smallest_dtype
from shoal.errors import UsageError

Difficulties = dict[str, float]
_PATH = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"


class _Measure:
    """One measure: its schedule, and the samples of a range of difficulties."""

    def __init__(self, name: str, config: CurriculumMetric, num_samples: int) -> None:
        self.scheduler = CurriculumScheduler(config.model_dump(exclude_none=True))
        self.is_single = config.clustering_type == "single_cluster"
        self.is_by_value = config.difficulty_type == "value"
        self.least = -math.inf if self.is_by_value else 0.0
        if self.is_single:
            return
        where = f"{_PATH}.{name}"
        self._samples = Rows(str(config.index_to_sample_path), f"{where}.index_to_sample_path")
        self._max = int(config.max_difficulty or 0)
        self._ends = np.cumsum(self._samples.lengths)
        if not len(self._ends) or self._ends[-1] != num_samples:
            raise UsageError(
                f"the analysis is of {self._ends[-1] if len(self._ends) else 0} samples, and the data set has"
                f" {num_samples}.",
                where=f"{where}.index_to_sample_path",
                do="analyse this data set: `shoal data analyse`, or DataAnalyzer.",
                code="curriculum-analysis",
            )
        if self.is_by_value:
            values = Rows(str(config.index_to_metric_path), f"{where}.index_to_metric_path")
            self._values = values.together().astype(np.float64)
            if len(self._values) != len(self._samples) or (np.diff(self._values) <= 0).any():
                raise UsageError(
                    f"it has {len(self._values)} values for {len(self._samples)} rows of samples, or they do not grow.",
                    where=f"{where}.index_to_metric_path",
                    do="name the two files of one metric.",
                    code="curriculum-analysis",
                )

    def between(self, low: float, high: float) -> np.ndarray:
        """The samples above difficulty ``low``, up to ``high``."""
        if self.is_by_value:
            first, stop = (int(np.searchsorted(self._values, bound, side="right")) for bound in (low, high))
            return self._samples.together(first, max(first, stop))
        of_percentile = int(self._ends[-1]) // self._max
        stop = int(self._ends[-1]) if high == self._max else of_percentile * int(high)
        return self._samples.together()[of_percentile * int(low) : stop]


@dataclass
class _Cluster:
    current: Difficulties  # up to which its samples are
    samples: np.ndarray
    taken: int = 0
    shuffles: list[str] = field(default_factory=list)  # states of the generator before each shuffle

    def state(self) -> dict[str, Any]:
        return {"current": self.current, "taken": self.taken, "shuffles": list(self.shuffles)}


class DifficultySampler:
    """The endless stream of samples that all ranks take together.

    Args:
        curriculum: its measures; files are opened here.
        seed: of what is drawn.
        num_samples: of the data set.
        global_batch: samples of a step, all micro-batches together.

    Raises: UsageError: a file of the analysis is missing, damaged, or of another data set.
    """

    def __init__(self, curriculum: SampleCurriculum, seed: int, num_samples: int, global_batch: int) -> None:
        metrics = curriculum.curriculum_metrics
        self._measures = {name: _Measure(name, metric, num_samples) for name, metric in metrics.items()}
        self._num_samples, self._global_batch = num_samples, global_batch
        self._random = np.random.default_rng(seed)
        self._clusters: list[_Cluster] = []
        self.difficulties: Difficulties = {}
        self.step = 0  # global batches drawn
        self._batch: list[int] = []
        self._taken = 0  # of the batch
        self._before: dict[str, Any] = self._here()

    def set_custom_schedule(self, functions: Callable[[int], int] | Mapping[str, Callable[[int], int]]) -> None:
        """The functions of measures whose ``schedule_type`` is ``custom``: from a step, counted from 1, by measure."""
        for name, measure in self._measures.items():
            function = functions.get(name) if isinstance(functions, Mapping) else functions
            if function is not None:
                measure.scheduler.set_custom_get_difficulty(function)

    def take(self, num: int) -> list[int]:
        """The next samples.

        Raises: UsageError: no sample is easy enough.
        """
        found: list[int] = []
        while len(found) < num:
            if self._taken == len(self._batch):
                self._next_batch()
            more = self._batch[self._taken : self._taken + num - len(found)]
            self._taken += len(more)
            found += more
        return found

    def state_dict(self) -> dict[str, Any]:
        """The position: the one before the current global batch, its size, and what of it was taken."""
        return {**self._before, "batch_size": len(self._batch), "taken": self._taken}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on at a position of a sampler with the same measures over the same data, at any global batch."""
        self.step = int(saved["step"])
        for name, place in saved["places"].items():
            if name in self._measures:
                self._measures[name].scheduler.set_current_difficulty(int(place))
        self.difficulties = dict(saved["difficulties"])
        self._clusters = []
        previous = {name: measure.least for name, measure in self._measures.items()}
        for each in saved["clusters"]:
            self._set_random(each["shuffles"][0])
            self._add_cluster(previous, each["current"])
            previous = each["current"]
            for state in each["shuffles"][1:]:
                self._set_random(state)
                self._shuffle(self._clusters[-1])
            self._clusters[-1].taken = int(each["taken"])
        self._set_random(saved["random"])
        self._before = self._here()
        self._batch, self._taken = [], 0
        if saved["batch_size"]:
            self._next_batch(int(saved["batch_size"]))
            self._taken = int(saved["taken"])

    def _here(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "step": self.step,
                "random": self._random_state(),
                "difficulties": self.difficulties,
                "places": {name: each.scheduler.get_current_difficulty() for name, each in self._measures.items()},
                "clusters": [cluster.state() for cluster in self._clusters],
            }
        )

    def _next_batch(self, size: int | None = None) -> None:
        self._before = self._here()
        self.step += 1
        now: Difficulties = {name: each.scheduler.update_difficulty(self.step) for name, each in self._measures.items()}
        if now != self.difficulties:
            least = {name: measure.least for name, measure in self._measures.items()}
            previous, self.difficulties = self.difficulties or least, now
            self._add_cluster(previous, now)
        if not self._clusters:
            raise UsageError(
                f"no sample of {self._num_samples} is as easy as {now}.",
                where=_PATH,
                do="raise min_difficulty.",
                code="curriculum-analysis",
            )
        size = size or self._global_batch
        sizes = [len(cluster.samples) for cluster in self._clusters]
        drawn = self._random.choice(len(sizes), size, replace=True, p=[each / sum(sizes) for each in sizes])
        batch: list[int] = []
        for cluster, num in zip(self._clusters, np.bincount(drawn, minlength=len(sizes)).tolist(), strict=True):
            batch += self._take_from(cluster, num)
        self._random.shuffle(batch)
        self._batch, self._taken = batch, 0

    def _take_from(self, cluster: _Cluster, num: int) -> list[int]:
        found: list[int] = cluster.samples[cluster.taken : cluster.taken + num].tolist()
        cluster.taken += num
        while len(found) < num:
            self._shuffle(cluster)
            cluster.taken = num - len(found)
            found += cluster.samples[: cluster.taken].tolist()
        return found

    def _add_cluster(self, previous: Difficulties, current: Difficulties) -> None:
        """The samples that are easy enough now, and are in no cluster yet, if there are any."""
        bounded = {name: measure for name, measure in self._measures.items() if not measure.is_single}
        everything = np.arange(self._num_samples, dtype=smallest_dtype(0, self._num_samples))
        if len(bounded) > 1:
            samples = everything
            for name, measure in bounded.items():
                easy = measure.between(measure.least, current[name])
                samples = np.intersect1d(samples, easy, assume_unique=True)
            for cluster in self._clusters:
                samples = np.setdiff1d(samples, cluster.samples, assume_unique=True)
        elif bounded:
            (name, measure), *_ = bounded.items()
            samples = measure.between(previous[name], current[name])
        else:
            samples = everything[:0] if self._clusters else everything
        if len(samples):
            self._clusters.append(_Cluster(current, np.array(samples)))
            self._shuffle(self._clusters[-1])

    def _shuffle(self, cluster: _Cluster) -> None:
        cluster.shuffles.append(self._random_state())
        self._random.shuffle(cluster.samples)

    def _random_state(self) -> str:
        state = self._random.bit_generator.state
        inner = state["state"]
        return ":".join(
            f"{number:x}" for number in (inner["state"], inner["inc"], state["has_uint32"], state["uinteger"])
        )

    def _set_random(self, text: str) -> None:
        state, inc, has_uint32, uinteger = (int(number, 16) for number in text.split(":"))
        self._random.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": inc},
            "has_uint32": has_uint32,
            "uinteger": uinteger,
        }
