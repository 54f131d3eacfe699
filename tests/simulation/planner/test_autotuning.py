"""``--autotuning``: which configurations a script runs with, and the files that say what was found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError, UsageError
from shoal.launch import Outcome
from shoal.planner.autotuning import Autotuner, Script, autotune

MICRO, STEPS, TRAIN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


def saturating(config: dict[str, Any]) -> float | None:
    """Samples per second: they grow up to a micro-batch of 8; 20 and more do not fit; stage 1 is the fastest."""
    micro = config[MICRO]
    return None if micro >= 20 else min(micro, 8) * 10 - 3 * abs(config["zero_optimization"]["stage"] - 1)


class Ranks:
    """In place of ranks: writes what ``speed`` says of a configuration; None: it fails."""

    def __init__(
        self, folder: Path, speed: Callable[[dict[str, Any]], float | None] = saturating, num_ranks: int = 2
    ) -> None:
        self.folder, self.speed, self.num_ranks = folder, speed, num_ranks
        self.started: list[tuple[str, ...]] = []
        self.said: list[str] = []

    def start(self, arguments: Any) -> Outcome:
        self.started.append(tuple(arguments))
        config = json.loads(Path(arguments[arguments.index("--deepspeed_config") + 1]).read_text())
        print("step 1")
        if (speed := self.speed(config)) is None:
            return Outcome(1, "shoal: rank 0 failed.\n[cuda-memory] out of memory\n  do: less\n")
        if "autotuning" in config:
            metrics = {"throughput": speed, "latency": 1e3 * config[TRAIN] / speed, "FLOPS_per_gpu": 7 * speed}
            Path(config["autotuning"]["metric_path"]).write_text(json.dumps(metrics))
        return Outcome(0)

    def script(self, file: dict[str, Any], *words: str) -> Script:
        folders = {"results_dir": str(self.folder / "results"), "exps_dir": str(self.folder / "exps")}
        section = {"enabled": True, **folders, **file.pop("autotuning", {})}
        (self.folder / "ds.json").write_text(json.dumps({**file, "autotuning": section}))
        arguments = ("--deepspeed", "--deepspeed_config", str(self.folder / "ds.json"), *words)
        return Script(("shoal", "run", "train.py"), arguments, self.num_ranks, self.start)

    def tuned(self, file: dict[str, Any], *words: str) -> Autotuner:
        tuner = Autotuner(self.script(file, *words), self.said.append)
        tuner.run()
        return tuner

    def tried(self, file: dict[str, Any], *words: str) -> list[str]:
        return [each.name for each in self.tuned(file, *words).done]


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_micro_batches_double_until_they_gain_nothing_and_the_next_stage_begins_where_the_last_was_best(
    ranks: Ranks,
) -> None:
    names = ranks.tried({"zero_optimization": {"stage": [0, 1]}, STEPS: 2})
    assert names == [
        *("z0_gas2_tmbspg1", "z0_gas2_tmbspg2", "z0_gas2_tmbspg4", "z0_gas2_tmbspg8", "z0_gas2_tmbspg16"),
        *("z1_gas2_tmbspg8", "z1_gas2_tmbspg16"),
        *("z1_gas2_tmbspg10", "z1_gas2_tmbspg12", "z1_gas2_tmbspg14"),  # between 8, the best, and 16
    ]
    assert ranks.said[0] == "z0_gas2_tmbspg1: throughput 7"


def test_without_a_stage_all_are_tried_and_what_fails_is_a_result(ranks: Ranks) -> None:
    names = ranks.tried({MICRO: 16, "autotuning": {"num_tuning_micro_batch_sizes": 1}})
    assert names == [
        *("z0_gas1_tmbspg16", "z0_gas1_tmbspg32", "z1_gas1_tmbspg16", "z1_gas1_tmbspg32"),
        *("z2_gas1_tmbspg16", "z2_gas1_tmbspg32", "z3_gas1_tmbspg16", "z3_gas1_tmbspg32", "z1_gas1_tmbspg24"),
    ]
    assert ranks.said[1] == "z0_gas1_tmbspg32: failed: shoal: rank 0 failed. [cuda-memory] out of memory"


def test_a_smallest_micro_batch_that_fails_is_followed_by_the_least_that_is_allowed(ranks: Ranks) -> None:
    names = ranks.tried({MICRO: 64, "zero_optimization": {"stage": 1}})
    assert names[:2] == ["z1_gas1_tmbspg64", "z1_gas1_tmbspg1"]


def test_a_list_of_micro_batches_is_tried_as_it_is(ranks: Ranks) -> None:
    assert ranks.tried({MICRO: [3, 5], "zero_optimization": {"stage": 2}}) == ["z2_gas1_tmbspg3", "z2_gas1_tmbspg5"]


def test_limits_of_the_global_batch_decide_the_accumulation(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, num_ranks=4)
    limits = {"max_train_batch_size": 20, "mp_size": 2}
    tuner = ranks.tuned({"zero_optimization": {"stage": 1}, "autotuning": limits})
    batches = {each.micro: (each.config[STEPS], each.config[TRAIN]) for each in tuner.done}
    assert {size: batches[size] for size in (1, 2, 4, 8)} == {1: (10, 20), 2: (5, 20), 4: (2, 16), 8: (1, 16)}
    assert max(batches) == 10
    fixed = ranks.tuned({"zero_optimization": {"stage": 1}, TRAIN: 24, "autotuning": {"mp_size": 2}})
    assert [(each.micro, each.config[STEPS]) for each in fixed.done] == [(1, 12), (2, 6), (4, 3), (12, 1), (6, 2)]
    least = ranks.tuned({"zero_optimization": {"stage": 1}, MICRO: [4], "autotuning": {"min_train_batch_size": 40}})
    assert least.done[0].config[STEPS] == 3


def test_arguments_of_the_script_follow_the_configuration(ranks: Ranks) -> None:
    mappings = {f"{MICRO} ": "--rows", STEPS: "--accumulate"}
    file = {MICRO: "auto", "zero_optimization": {"stage": 1}, "autotuning": {"arg_mappings": mappings}}
    tuner = ranks.tuned(file, "--rows=4", "--lr", "0.1")
    results = ranks.folder / "results"
    first = ("--deepspeed", "--deepspeed_config", str(results / "z1_gas1_tmbspg4" / "ds_config.json"))
    assert ranks.started[0] == (*first, "--rows=4", "--lr", "0.1", "--accumulate", "1")
    assert tuner.optimal is not None and tuner.optimal[3] == "--rows=8"


def test_the_files_are_deepspeeds(ranks: Ranks) -> None:
    file = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"}, MICRO: [4, 8]}
    assert autotune(ranks.script(file), "run", ranks.said.append) == Outcome(0)
    results = ranks.folder / "results"
    optimal = json.loads((results / "ds_config_optimal.json").read_text())
    sizes = {MICRO: 8, STEPS: 1, TRAIN: 16}
    assert optimal == {**sizes, "zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"}}
    command = f"shoal run train.py --deepspeed --deepspeed_config {results / 'ds_config_optimal.json'}"
    assert (results / "cmd_optimal.txt").read_text() == command + "\n"
    assert len(ranks.started) == 3 and ranks.started[-1][-1] == str(results / "ds_config_optimal.json")
    assert "| z1 | 2 | 80 | z1_gas1_tmbspg8 |\n| global | 2 | 80 |" in (results / "summary.txt").read_text()
    one = results / "z1_gas1_tmbspg4"
    assert (one / "stdout.log").read_text() == "step 1\n"
    assert json.loads((one / "metrics.json").read_text())["throughput"] == 40
    record = json.loads((one / "exp.json").read_text())
    assert record["results"]["throughput"] == 40 and record["cmd"] == (one / "cmd.txt").read_text().strip()
    assert json.loads((ranks.folder / "exps" / "z1_gas1_tmbspg4.json").read_text())["ds_config"][MICRO] == 4


def test_finished_experiments_are_kept_only_where_the_file_says_so(ranks: Ranks) -> None:
    for overwrite, runs in ((False, 2), (False, 0), (True, 2)):
        ranks.started.clear()
        file = {MICRO: [4, 32], "zero_optimization": {"stage": 1}, "autotuning": {"overwrite": overwrite}}
        assert [each.score for each in ranks.tuned(file).done] == [40, 0]
        assert len(ranks.started) == runs
    file = {MICRO: [4, 32], "zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}
    ranks.tuned({**file, "autotuning": {"overwrite": False}})
    assert len(ranks.started) == 4  # another configuration


@pytest.mark.parametrize("tuner_type", ["gridsearch", "random", "model_based"])
def test_keys_are_tried_at_the_best_micro_batch_in_the_order_of_the_tuner(tmp_path: Path, tuner_type: str) -> None:
    def speed(config: dict[str, Any]) -> float:
        zero = config["zero_optimization"]
        return 100 * (2 if zero["reduce_bucket_size"] == 30 else 1) * (0.5 if zero["overlap_comm"] else 1)

    ranks = Ranks(tmp_path, speed)
    zero = {"stage": 1, "overlap_comm": [True, False], "reduce_bucket_size": [10, 20, 30]}
    section = {"fast": False, "tuner_type": tuner_type, "tuner_early_stopping": 50}
    names = ranks.tried({MICRO: [4], "zero_optimization": zero, "autotuning": section})
    keys = [f"_oc{overlap}_rbs{size}" for overlap in (True, False) for size in (10, 20, 30)]
    assert names[0] == "z1_gas1_tmbspg4" and sorted(names[1:]) == sorted(f"{names[0]}{key}" for key in keys[1:])
    if tuner_type == "gridsearch":
        assert names[1:] == [f"{names[0]}{key}" for key in keys[1:]]
    best = names.index(f"{names[0]}_ocFalse_rbs30")
    assert tuner_type != "model_based" or best <= 4


def test_a_stages_experiments_end_by_number_and_without_gain(ranks: Ranks) -> None:
    def file(**section: Any) -> dict[str, Any]:
        zero = {"stage": 1, "reduce_bucket_size": [10, 20, 30, 40, 50]}
        section = {"fast": False, **section}
        return {MICRO: [2, 4], "zero_optimization": {**zero, "overlap_comm": True}, "autotuning": section}

    assert len(ranks.tried(file(tuner_num_trials=4))) == 4
    assert len(ranks.tried(file(tuner_early_stopping=3))) == 4  # 2, 4 (the first bucket), and two more
    assert len(ranks.tried(file())) == 6
    assert len(ranks.tried({"zero_optimization": {"stage": 1}, "autotuning": {"tuner_num_trials": 2}})) == 2


def test_latency_and_flops_are_metrics_too(ranks: Ranks) -> None:
    section: dict[str, Any] = {"metric": "latency", "max_train_batch_size": 16}
    tuner = ranks.tuned({"zero_optimization": {"stage": 1}, "autotuning": section})
    assert {each.config[TRAIN] for each in tuner.done} == {16}
    assert [each.micro for each in tuner.done] == [1, 2, 4, 8]
    assert "| z1 | 4 | 200 | z1_gas1_tmbspg8 |" in (ranks.folder / "results" / "summary.txt").read_text()
    tuner = ranks.tuned({MICRO: [4], "zero_optimization": {"stage": 1}, "autotuning": {"metric": "flops"}})
    assert tuner.done[0].score == 280


def test_an_experiment_that_ends_before_it_has_measured_has_failed(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.start = lambda arguments: Outcome(0)  # type: ignore[method-assign]
    outcome = autotune(ranks.script({MICRO: [4], "zero_optimization": {"stage": 1}}), "run", ranks.said.append)
    assert outcome.exit_code == 1 and "every experiment has failed" in outcome.report
    assert "the script has ended before it took 6 steps" in outcome.report


def test_a_signal_ends_the_search(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.start = lambda arguments: Outcome(130, "shoal: stopped by SIGINT")  # type: ignore[method-assign]
    with pytest.raises(SystemExit, match="130"):
        ranks.tuned({MICRO: [4], "zero_optimization": {"stage": 1}})


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ({"autotuning": {"enabled": False}}, "enabled is false, but --autotuning asks for it"),
        ({"autotuning": {"mp_size": 3}}, "mp_size = 3 does not divide 2 ranks"),
        ({"autotuning": {"metric": "latency"}}, "have to have the same number of samples"),
        ({"autotuning": {"metric": "speed"}}, '"speed" is not one of'),
        ({"autotuning": {"arg_mappings": {"rows": "--rows"}}}, "no configuration that is tried has a key rows"),
        ({STEPS: [1, 2]}, r"gradient_accumulation_steps = \[1, 2\], of which --autotuning makes no"),
        ({"zero_optimization": True}, "write an object"),
        ({TRAIN: 7}, "a global batch of 7 for 2 data-parallel ranks"),
        ({TRAIN: 32, "autotuning": {"max_train_batch_size": 16}}, "max_train_batch_size = 16"),
        ({MICRO: [4], "autotuning": {"max_train_batch_size": 4}}, "no micro-batch is possible from 1 to 1024, and 2"),
        ({"zero_optimization": {"stage": 1, "chunk": 3}}, "chunk: no such key"),
        ({"autotuning": {"start_profile_step": 9}}, "end_profile_step: 5 is less than start_profile_step = 9"),
        ({"autotuning": {"start_profile_step": 0, "metric": "flops"}}, "start_profile_step: 0 with metric flops"),
    ],
)
def test_what_does_not_fit_is_an_error_before_anything_runs(ranks: Ranks, file: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Autotuner(ranks.script(file), ranks.said.append)
    assert not ranks.started


def test_a_script_without_a_configuration_is_refused(ranks: Ranks) -> None:
    for words in ((), ("--deepspeed",), ("--deepspeed", "--lr", "1")):
        with pytest.raises(UsageError, match="no argument of the script names a configuration"):
            Autotuner(Script(("shoal",), words, 2, ranks.start), ranks.said.append)
