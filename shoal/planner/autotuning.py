"""``--autotuning tune`` and ``run``: a script runs for some steps with one configuration after the other.

    stages          zero_optimization.stage: a number, a list, or "all", as where there is none
    micro-batches   of each stage m, 2 m, 4 m ... until a run fails or gains less than 5 %; m is the smallest, of the
                    next stage the best so far. A list in the file is tried as it is
    between         of the best stage, num_tuning_micro_batch_sizes around the best power of two
    keys            of the best stage, with "fast": false: the lists in zero_optimization, or ``KEYS``

    EXPS/NAME.json                                        name, configuration, number of ranks
    RESULTS/NAME/ds_config.json, cmd.txt                  the same, and the command
    RESULTS/NAME/stdout.log, stderr.log, metrics.json     what the run has written
    RESULTS/NAME/exp.json                                 the experiment with its metrics, or its error
    RESULTS/summary.txt                                   the best of each stage
    RESULTS/ds_config_optimal.json, cmd_optimal.txt       the best

Source: names and meaning of keys and files: DeepSpeed 0.19.8, ``deepspeed/autotuning``.
"""

from __future__ import annotations

import json
import random
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

from shoal.config import load
from shoal.config.batch import MICRO, STEPS, TRAIN
from shoal.config.source import open_source
from shoal.errors import ConfigError, UsageError
from shoal.launch.local import Outcome
from shoal.planner.corrected import corrected

_GAIN = 1.05  # that a larger micro-batch has to bring, else the next one is not tried
_STOPPED = (130, 143)  # exit codes of a launcher that SIGINT or SIGTERM has stopped
_METRICS = {"throughput": "throughput", "latency": "latency", "flops": "FLOPS_per_gpu"}
_ARGUMENTS = ("--deepspeed_config", "--deepspeed")
# What is tried with "fast": false where the file says nothing, by stage.
_OF_ALL: dict[str, tuple[Any, ...]] = {
    "overlap_comm": (True, False),
    "reduce_bucket_size": (500_000_000, 50_000_000, 5_000_000),
}
KEYS: dict[Any, dict[str, tuple[Any, ...]]] = {
    1: _OF_ALL,
    2: _OF_ALL,
    3: {**_OF_ALL, "stage3_max_reuse_distance": (0, 1_000_000_000)},
}


@dataclass(frozen=True)
class Script:
    """How a launcher runs the user's script.

    Args:
        command: the launcher's words, up to the script's arguments.
        arguments: of the script; one of them names the configuration.
        start: runs it to its end, with other arguments.
    """

    command: tuple[str, ...]
    arguments: tuple[str, ...]
    num_ranks: int
    start: Callable[[Sequence[str]], Outcome]

    @property
    def file(self) -> str:
        """Of the configuration. Raises: UsageError: no argument names one."""
        for name in _ARGUMENTS:
            if (value := _value(self.arguments, name)) is not None and not value.startswith("-"):
                return value
        raise UsageError(
            "--autotuning, but no argument of the script names a configuration.",
            do="give the script --deepspeed_config FILE, or --deepspeed FILE.",
            code="autotuning-config",
        )

    def with_config(self, path: Path, values: Mapping[str, Any]) -> tuple[str, ...]:
        """The arguments with another configuration. Args: ``values``: of other arguments, by name."""
        name = next(each for each in _ARGUMENTS if _value(self.arguments, each) == self.file)
        made = self.arguments
        for flag, value in {**values, name: path}.items():
            made = _with_value(made, flag, str(value))
        return made


@dataclass(frozen=True)
class Experiment:
    """A run with one configuration. ``score``: larger is better; 0: it failed, as ``error`` says."""

    name: str
    stage: Any
    micro: int
    config: dict[str, Any]
    score: float = 0.0
    error: str = ""


class Autotuner:
    """The search. ``say`` gets a line for each experiment.

    Attributes: ``optimal``: the script's arguments with the best configuration; None: no run has succeeded.

    Raises: ConfigError, UsageError: the configuration, or a key of ``autotuning``, does not fit the script and the
        number of ranks.
    """

    def __init__(self, script: Script, say: Callable[[str], object]) -> None:
        self.script, self.say = script, say
        self.values: dict[str, Any] = open_source(script.file)[0].value
        self.zero: dict[str, Any] = self._checked("zero_optimization", {}, dict)
        for key in (STEPS, TRAIN):
            self._checked(key, "auto", int, str)
        given = self._checked("autotuning", {}, dict)
        if given.get("enabled") is False:
            raise ConfigError(
                "autotuning.enabled is false, but --autotuning asks for it.",
                do="write true, or leave --autotuning out.",
                code="autotuning-config",
            )
        settings = load({MICRO: 1, "autotuning": {**given, "enabled": True}})
        self.section = settings.autotuning
        self.mappings = {key.strip(): flag.strip() for key, flag in (self.section.arg_mappings or {}).items()}
        self.results, self.exps = Path(self.section.results_dir).absolute(), Path(self.section.exps_dir).absolute()
        self.done: list[Experiment] = []
        self.optimal: tuple[str, ...] | None = None
        if script.num_ranks % self.section.mp_size:
            raise ConfigError(
                f"autotuning.mp_size = {self.section.mp_size} does not divide {script.num_ranks} ranks.",
                do="write the number of ranks that get the same samples.",
                code="autotuning-config",
            )
        self.dp = script.num_ranks // self.section.mp_size
        self.rows, self.is_fixed = self._rows()
        first = self._config(self.stages[0], self.sizes[0], {})
        unknown = [key for key in self.mappings if _find(first, key) is None]
        if unknown:
            raise ConfigError(
                f"autotuning.arg_mappings: no configuration that is tried has a key {', '.join(unknown)}.",
                do=f"name keys such as {MICRO} and {STEPS}.",
                code="autotuning-config",
            )
        if '"auto"' not in json.dumps(self.values):  # which the script replaces
            world_size = script.num_ranks if self.section.mp_size == 1 else None  # others come from the script
            load(first, world_size=world_size, warns=False)
        for note in settings.notes():
            self.say(note)

    def run(self) -> Experiment | None:
        """Search, and write the best. Returns: it; None: every run has failed."""
        began, smallest = time.monotonic(), self.sizes[0]
        for stage in self.stages:
            best = self._ascend(stage, smallest)
            smallest = smallest if best is None or isinstance(self.values.get(MICRO), list) else best.micro
        if (best := self.best()) is not None:
            self._try(best.stage, ((size, {}) for size in self._between(best)))
            best = self.best() or best
            if not self.section.fast:
                self._try_keys(best)
        self._write(timedelta(seconds=round(time.monotonic() - began)))
        return self.best()

    def best(self, stage: Any = None) -> Experiment | None:
        ran = [each for each in self.done if each.score and stage in (None, each.stage)]
        return max(ran, key=lambda each: each.score, default=None)

    # what is tried

    def _checked(self, key: str, default: Any, *kinds: type) -> Any:
        """The file's value. Raises: ConfigError: one from which no configuration can be made."""
        value = self.values.get(key, default)
        if not isinstance(value, kinds):
            words = {int: "a number", str: '"auto"', dict: "an object"}
            raise ConfigError(
                f"{key} = {json.dumps(value)}, of which --autotuning makes no configurations.",
                do=f"write {' or '.join(words[kind] for kind in kinds)}.",
                code="autotuning-config",
            )
        return value

    @property
    def stages(self) -> list[Any]:
        """Those of the file, or all."""
        stage = self.zero.get("stage", "all")
        return [0, 1, 2, 3] if stage == "all" else stage if isinstance(stage, list) else [stage]

    @property
    def sizes(self) -> list[int]:
        """Micro-batches that are possible, the first one first."""
        section, given = self.section, self.values.get(MICRO)
        low, high = section.min_train_micro_batch_size_per_gpu, section.max_train_micro_batch_size_per_gpu
        if isinstance(given, list):
            low, possible = 1, [size for size in given if isinstance(size, int)]
        else:
            start = given if isinstance(given, int) else self._argument(MICRO) or low
            possible = list(range(max(low, start), min(high, self.rows or high) + 1))
        made = [size for size in possible if self.rows is None or not (self.is_fixed and self.rows % size)]
        made = [size for size in made if low <= size <= min(high, self.rows or high)]
        if not made:
            limit = "" if self.rows is None else f", and {self.rows} samples of a step on a rank"
            raise ConfigError(
                f"autotuning: no micro-batch is possible from {low} to {high}{limit}.",
                do=f"change the limits in autotuning, {MICRO}, or the global batch.",
                code="autotuning-batch",
            )
        return made

    def _rows(self) -> tuple[int | None, bool]:
        """Samples of a step on each data-parallel rank, at most; and whether they have to be as many."""
        section, batch = self.section, self.values.get(TRAIN)
        is_fixed = isinstance(batch, int) or section.metric == "latency"
        rows = batch if isinstance(batch, int) else section.max_train_batch_size
        if section.metric == "latency" and rows is None:
            raise ConfigError(
                'autotuning.metric = "latency" compares steps, which have to have the same number of samples.',
                do="give autotuning.max_train_batch_size or train_batch_size, or take throughput.",
                code="autotuning-batch",
            )
        limit = section.max_train_batch_size
        if rows is not None and ((is_fixed and rows % self.dp) or rows < self.dp or rows > (limit or rows)):
            raise ConfigError(
                f"a global batch of {rows} for {self.dp} data-parallel ranks, with autotuning.max_train_batch_size ="
                f" {limit}.",
                do=f"write a multiple of {self.dp} that is within the limit.",
                code="autotuning-batch",
            )
        return (None if rows is None else rows // self.dp), is_fixed

    def _argument(self, key: str) -> int | None:
        """What the script's argument of a key says."""
        value = _value(self.script.arguments, self.mappings.get(key, ""))
        return int(value) if value is not None and value.isdecimal() else None

    def _config(self, stage: Any, micro: int, zero: Mapping[str, Any]) -> dict[str, Any]:
        given = self.values.get(STEPS)
        steps = given if isinstance(given, int) else self._argument(STEPS) or 1
        least = -(-self.section.min_train_batch_size // (micro * self.dp))
        steps = max(steps, least) if self.rows is None else self.rows // micro
        first = {key: value[0] if isinstance(value, list) and value else value for key, value in self.zero.items()}
        section = self.section.model_dump(include={"start_profile_step", "end_profile_step", "metric"})
        sizes = {MICRO: micro, STEPS: steps, TRAIN: micro * steps * self.dp}
        zero = {**first, "stage": stage, **zero}
        return {**self.values, **sizes, "zero_optimization": zero, "autotuning": {"enabled": True, **section}}

    def _ascend(self, stage: Any, smallest: int) -> Experiment | None:
        """Larger and larger micro-batches of a stage; or those that the file lists."""
        sizes = [size for size in self.sizes if size >= smallest]
        if isinstance(self.values.get(MICRO), list):
            self._try(stage, ((size, {}) for size in sizes))
            return self.best(stage)
        last = 0.0
        size: int | None = sizes[0]
        while size is not None and not self._is_full(stage):
            done = self._experiment(stage, size, {})
            least = self.section.min_train_micro_batch_size_per_gpu
            if not done.score and size == sizes[0] and size > least:
                self._try(stage, [(least, {})])
            if not done.score or done.score < _GAIN * last:
                break
            last = done.score
            larger = [each for each in sizes if each > size]
            size = next((each for each in larger if each >= 2 * size), larger[-1] if larger else None)
        return self.best(stage)

    def _between(self, best: Experiment) -> list[int]:
        """Micro-batches between the best one and its neighbours, evenly."""
        tried = sorted(each.micro for each in self.done if each.stage == best.stage)
        low = max((size for size in tried if size < best.micro), default=best.micro)
        high = min((size for size in tried if size > best.micro), default=best.micro)
        left = [size for size in self.sizes if low < size < high and size not in tried]
        if isinstance(self.values.get(MICRO), list):
            return []
        step = max(len(left) / self.section.num_tuning_micro_batch_sizes, 1.0)
        return [left[int((number + 0.5) * step)] for number in range(round(len(left) / step))]

    def _try_keys(self, best: Experiment) -> None:
        """Each combination of the lists, with the best micro-batch."""
        lists = {key: tuple(value) for key, value in self.zero.items() if isinstance(value, list) and key != "stage"}
        lists |= {key: values for key, values in KEYS.get(best.stage, {}).items() if key not in self.zero}
        made = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
        if self.section.tuner_type == "random":
            random.Random(0).shuffle(made)
        if self.section.tuner_type == "model_based":
            self._try(best.stage, ((best.micro, keys) for keys in self._by_model(made, best)))
        else:
            self._try(best.stage, ((best.micro, keys) for keys in made))

    def _by_model(self, left: list[dict[str, Any]], best: Experiment) -> Iterator[dict[str, Any]]:
        """The combination that is fastest by those measured so far, one after the other."""
        ran: list[tuple[Mapping[str, Any], float, float]] = []
        while left:
            guesses = corrected([(keys, 1.0) for keys in left], ran)
            keys = left.pop(min(range(len(left)), key=lambda index: guesses[index].at_best(1.0)))
            yield keys
            config = self._config(best.stage, best.micro, keys)
            ran += [(keys, 1.0, 1.0 / each.score) for each in self.done if each.config == config and each.score]

    def _is_full(self, stage: Any) -> bool:
        return len([each for each in self.done if each.stage == stage]) >= self.section.tuner_num_trials

    def _try(self, stage: Any, tries: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """One after the other, until the stage has as many experiments as it may, or so many without gain."""
        without = 0
        for micro, zero in tries:
            best = self.best(stage)
            if any(each.stage == stage and each.error and each.micro < micro for each in self.done):
                continue
            if self._is_full(stage):
                return
            done = self._experiment(stage, micro, zero)
            without = 0 if best is None or done.score > best.score else without + 1
            if without >= self.section.tuner_early_stopping:
                return

    # one experiment

    def _experiment(self, stage: Any, micro: int, zero: Mapping[str, Any]) -> Experiment:
        config = self._config(stage, micro, zero)
        if (before := next((each for each in self.done if each.config == config), None)) is not None:
            return before
        keys = "".join(f"_{''.join(word[0] for word in key.split('_'))}{value}" for key, value in zero.items())
        name = f"z{stage}_gas{config[STEPS]}_tmbspg{micro}{keys}"
        done = self._run(Experiment(name, stage, micro, config))
        self.done.append(done)
        metric = self.section.metric
        value = 1.0 / done.score if done.score and metric == "latency" else done.score
        self.say(f"{name}: {metric} {value:.5g}" if done.score else f"{name}: failed: {done.error}")
        return done

    def _run(self, one: Experiment) -> Experiment:
        folder = self.results / one.name
        metrics, record = folder / "metrics.json", folder / "exp.json"
        config = {**one.config, "autotuning": {**one.config["autotuning"], "metric_path": str(metrics)}}
        arguments = self.script.with_config(
            folder / "ds_config.json", {flag: _find(one.config, key) for key, flag in self.mappings.items()}
        )
        command = shlex.join([*self.script.command, *arguments])
        experiment = {"name": one.name, "ds_config": config, "num_gpus": self.script.num_ranks, "cmd": command}
        if not self.section.overwrite and record.is_file():
            kept = json.loads(record.read_text(encoding="utf-8"))
            if {key: kept.get(key) for key in experiment} == experiment and ("results" in kept or "error" in kept):
                return self._scored(one, kept)
        for path in (folder, self.exps):
            path.mkdir(parents=True, exist_ok=True)
        metrics.unlink(missing_ok=True)
        for path, value in (
            (self.exps / f"{one.name}.json", experiment),
            (folder / "ds_config.json", config),
            (record, experiment),
        ):
            path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        (folder / "cmd.txt").write_text(command + "\n", encoding="utf-8")
        with (
            (folder / "stdout.log").open("w", encoding="utf-8") as out,
            (folder / "stderr.log").open("w", encoding="utf-8") as err,
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            outcome = self.script.start(arguments)
            err.write(outcome.report)
        if outcome.exit_code in _STOPPED:
            raise SystemExit(outcome.exit_code)
        made: dict[str, Any] = {"result_dir": str(folder)}
        if metrics.is_file():
            made["results"] = json.loads(metrics.read_text(encoding="utf-8"))
        else:
            steps = self.section.end_profile_step + 1
            made["error"] = outcome.brief or f"the script has ended before it took {steps} steps"
        record.write_text(json.dumps({**experiment, **made}, indent=2) + "\n", encoding="utf-8")
        return self._scored(one, made)

    def _scored(self, one: Experiment, made: Mapping[str, Any]) -> Experiment:
        if "error" in made:
            return replace(one, error=made["error"])
        value = made["results"][_METRICS[self.section.metric]]
        return replace(one, score=1.0 / value if self.section.metric == "latency" else value)

    def _write(self, taken: timedelta) -> None:
        """The summary; and the best configuration, with its command."""
        self.results.mkdir(parents=True, exist_ok=True)
        rows = ["| tuning_space | num_experiments | best_metric_val | best_exp_name |", "|:--|--:|--:|:--|"]
        for stage in [*self.stages, None]:
            best, num = self.best(stage), len([each for each in self.done if stage in (None, each.stage)])
            value = 0.0 if best is None else 1 / best.score if self.section.metric == "latency" else best.score
            name = "" if best is None else best.name
            rows.append(f"| {'global' if stage is None else f'z{stage}'} | {num} | {value:.6g} | {name} |")
        text = "\n".join(rows) + f"\n\nTuning completed in {taken}. Total number of experiments: {len(self.done)}.\n"
        (self.results / "summary.txt").write_text(text, encoding="utf-8")
        self.say("\n" + text)
        if (best := self.best()) is None:
            return
        path = self.results / "ds_config_optimal.json"
        config = {key: value for key, value in best.config.items() if key != "autotuning"}
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        self.optimal = self.script.with_config(path, {flag: _find(config, key) for key, flag in self.mappings.items()})
        command = shlex.join([*self.script.command, *self.optimal])
        (self.results / "cmd_optimal.txt").write_text(command + "\n", encoding="utf-8")
        self.say(f"the best is {best.name}; wrote {path} and cmd_optimal.txt")


def autotune(script: Script, mode: str, say: Callable[[str], object]) -> Outcome:
    """Search; in the mode "run", then run the script with the best configuration.

    Returns: how that run has ended; exit code 1: every experiment has failed.
    """
    tuner = Autotuner(script, say)
    tuner.run()
    if tuner.optimal is None:
        errors = "\n".join(f"  {each.name}: {each.error}" for each in tuner.done[:4])
        return Outcome(1, f"shoal: every experiment has failed; their output is in {tuner.results}.\n{errors}")
    return script.start(tuner.optimal) if mode == "run" else Outcome(0)


def _value(arguments: Sequence[str], name: str) -> str | None:
    """Of an argument: ``--name value`` or ``--name=value``."""
    for index, word in enumerate(arguments):
        if word == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if word.startswith(f"{name}="):
            return word[len(name) + 1 :]
    return None


def _with_value(arguments: tuple[str, ...], name: str, value: str) -> tuple[str, ...]:
    for index, word in enumerate(arguments):
        if word == name:
            return (*arguments[: index + 1], value, *arguments[index + 2 :])
        if word.startswith(f"{name}="):
            return (*arguments[:index], f"{name}={value}", *arguments[index + 1 :])
    return (*arguments, name, value)


def _find(config: Mapping[str, Any], key: str) -> Any:
    """The first value of a key, in any section."""
    if key in config:
        return config[key]
    inner = (_find(value, key) for value in config.values() if isinstance(value, dict))
    return next((value for value in inner if value is not None), None)
