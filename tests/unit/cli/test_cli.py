"""The command line: what it lists, what it makes of options and a file, and one whole run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli import main
from shoal.cli.app import app
from shoal.cli.job import TrainJob, describe_shape, effective_config, read_config, usual_learning_rate
from shoal.cli.start import start
from shoal.cli.usage import exit_code_of
from shoal.data import ByteTokenizer, TokenFileWriter
from shoal.errors import CheckpointError, ConfigError, ModelError, UsageError
from shoal.launch.local import misplaced_ranks
from tests.helpers.places import EXAMPLES


def configure(job: TrainJob, **file: object) -> tuple[dict[str, object], list[str]]:
    return effective_config(job, file, 1_000_000, has_accelerator=False)


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    listed = [line.split()[1] for line in result.output.splitlines() if re.match(r"│ [a-z]", line)]
    assert listed[:4] == ["run", "train", "report", "doctor"]
    assert "--show-completion" in result.output


def test_help_shows_the_defaults() -> None:
    text = " ".join(CliRunner(env={"COLUMNS": "200"}).invoke(app, ["train", "--help"]).output.replace("│", " ").split())
    for default in (
        "one per visible GPU, else 1",
        "bf16 on a GPU, fp32 on CPU",
        "runs/DATE-TIME",
        "the tokenizer's",
        "2",
    ):
        assert f"Default: {default}." in text


@pytest.mark.parametrize("command", ["run", "train", "doctor", "checkpoint list", "deepspeed", "convert", "schedule"])
def test_every_command_has_h(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "-h"])
    assert result.exit_code == 0
    if command == "run":
        assert "shoal run [OPTIONS] SCRIPT [ARGS]..." in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.py"], "there is no file 'nowhere.py'"),
        (["deepspeed", "--num_gpus", "2", "nowhere.py"], "there is no file 'nowhere.py'"),
        (["run", "--module", "no_such_module.main"], "there is no module 'no_such_module.main'"),
        (["run", "broken.py", "--option"], "broken.py, line 2: "),
        (["train", "--out", "broken.py/run"], "--out 'broken.py/run': Not a directory"),
        (["doctor", "nowhere.json"], "there is no file 'nowhere.json'"),
        (["train", "--config", "typo.json"], "steps_per_prnt: no such key."),
    ],
)
def test_what_is_wrong_with_a_command_is_said_before_a_rank_starts_and_gives_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["shoal", *arguments])
    (tmp_path / "broken.py").write_text("x = 1\nif x\n")
    (tmp_path / "typo.json").write_text('{"steps_per_prnt": 3}')
    monkeypatch.setattr("shoal.launch.run_local", None)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(("shoal: [usage] ", "shoal: [config] "))
    assert message in said.splitlines()[0]


def test_an_unknown_option_of_run_is_not_taken_for_the_script() -> None:
    result = CliRunner().invoke(app, ["run", "--rnaks", "2", "x.py"])
    assert result.exit_code == 2
    assert "--rnaks" in result.output


def test_what_failed_while_it_was_done_gives_1_and_what_the_user_wrote_2() -> None:
    assert exit_code_of(CheckpointError("damaged")) == 1
    assert [exit_code_of(kind("x")) for kind in (UsageError, ConfigError, ModelError)] == [2, 2, 2]


def test_verbose_asks_the_engine_for_the_tables() -> None:
    assert configure(TrainJob(verbose=True))[0]["log_level"] == "debug"
    assert "log_level" not in configure(TrainJob())[0]


def test_help_is_there_at_once_because_nothing_heavy_is_imported() -> None:
    run = "import sys, shoal.cli; sys.argv = ['shoal', '--help']\ntry: shoal.cli.main()"
    code = run + "\nexcept SystemExit: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "numpy", "tensorboard"} & set(done.stdout.splitlines()[-1].split())


def test_defaults_are_zero_3_adamw_and_clipping() -> None:
    config, notes = configure(TrainJob())
    assert notes == []
    assert config["zero_optimization"] == {"stage": 3, "stage3_param_persistence_threshold": 0}
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["gradient_clipping"] == 1.0
    assert config["optimizer"]["params"]["lr"] == usual_learning_rate(1_000_000) == 0.0013  # type: ignore[index]
    assert "bf16" not in config


def test_on_an_accelerator_the_default_precision_is_bf16() -> None:
    config, _ = effective_config(TrainJob(), {}, 1_000_000, has_accelerator=True)
    assert config["bf16"] == {"enabled": True}
    config, _ = effective_config(TrainJob(precision="fp32"), {}, 1_000_000, has_accelerator=True)
    assert "bf16" not in config


def test_the_file_wins_over_defaults_and_options_win_over_the_file_and_say_so() -> None:
    job = TrainJob(config="ds.json", stage=2, learning_rate=0.01, precision="bf16", clip=0.5)
    config, notes = configure(
        job,
        zero_optimization={"stage": 1, "overlap_comm": True},
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        fp16={"enabled": True},
        train_batch_size=32,
    )
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert config["optimizer"] == {"type": "SGD", "params": {"lr": 0.01}}
    assert (config["fp16"], config["bf16"]) == ({"enabled": False}, {"enabled": True})
    assert config["train_batch_size"] == 32
    assert "train_micro_batch_size_per_gpu" not in config
    assert config["gradient_clipping"] == 0.5
    assert notes == [
        "--stage 2 overrides zero_optimization.stage = 1 of ds.json.",
        "--precision bf16 overrides fp16.enabled = true of ds.json.",
        "--learning-rate 0.01 overrides optimizer.params.lr = 0.1 of ds.json.",
    ]


def test_a_micro_batch_option_drops_the_files_global_batch_and_says_so() -> None:
    config, notes = configure(TrainJob(config="ds.json", micro_batch=4), train_batch_size=32)
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert "train_batch_size" not in config
    assert notes == ["--micro-batch and --accumulation override train_batch_size of ds.json."]


def test_auto_in_a_file_stands_for_the_default() -> None:
    config, notes = configure(
        TrainJob(config="ds.json"),
        train_micro_batch_size_per_gpu="auto",
        gradient_clipping="auto",
        zero_optimization={"stage": 3, "reduce_bucket_size": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}},
    )
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["zero_optimization"] == {"stage": 3}
    assert config["optimizer"]["params"] == {"lr": 0.0013, "eps": 1e-8}  # type: ignore[index]
    assert notes == []


def test_a_file_that_does_not_speak_of_zero_means_stage_0() -> None:
    config, _ = configure(TrainJob(config="ds.json"), train_batch_size=8)
    assert config["zero_optimization"] == {"stage": 0}


def test_a_shape_is_chosen_by_name_number_or_parts() -> None:
    assert TrainJob().shape(256).hidden_size == 128
    assert TrainJob(model="124m", sequence=512).shape(300).sequence_length == 512
    assert abs(TrainJob(parameters="10M").shape(256).num_parameters() / 1e7 - 1) < 0.1
    parts = TrainJob(layers=3, hidden=96, sequence=32).shape(256)
    assert (parts.num_layers, parts.hidden_size, parts.num_heads, parts.sequence_length) == (3, 96, 3, 32)


def test_a_shape_chosen_twice_and_too_small_a_vocabulary_are_refused() -> None:
    with pytest.raises(UsageError, match="both choose the shape"):
        TrainJob(model="tiny", parameters="1M").shape(256)
    with pytest.raises(UsageError, match=r"--vocab 100 is smaller than the tokenizer's 256"):
        TrainJob(vocab=100).shape(256)


def test_the_example_with_experts_divides_them_and_takes_an_option_in_place_of_its_degree() -> None:
    path = EXAMPLES / "experts.json"
    job = TrainJob(config=str(path), experts=8)
    config, notes = configure(job, **read_config(job))
    assert (config["parallel"], notes) == ({"ep": 2}, [])
    config, notes = configure(TrainJob(config="experts.json", experts=8, ep=4), **read_config(job))
    assert config["parallel"] == {"ep": 4}
    assert notes == ["--ep 4 overrides parallel.ep = 2 of experts.json."]


def test_experts_are_added_to_a_shape_and_divided_among_ranks() -> None:
    assert TrainJob().shape(256).num_experts == 0
    shape = TrainJob(experts=8, ep=2).shape(256)
    assert (shape.num_experts, shape.experts_per_token) == (8, 2)
    assert TrainJob(experts=1).shape(256).experts_per_token == 1
    assert TrainJob(experts=8, top_k=4).shape(256).experts_per_token == 4
    assert describe_shape(shape) == "tiny with 8 experts, 2 per token"
    config, _ = configure(TrainJob(experts=8, ep=2))
    assert config["parallel"] == {"ep": 2}


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (TrainJob(top_k=1), "--top-k 1 is for experts, but the model has none"),
        (TrainJob(ep=2), "--ep 2 is for experts, but the model has none"),
        (TrainJob(experts=6, ep=4), "--ep 4 does not divide --experts 6"),
    ],
)
def test_options_of_experts_that_do_not_fit_are_refused(job: TrainJob, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        job.shape(256)


def test_time_limits_a_run_unless_steps_do() -> None:
    assert TrainJob().seconds == 180
    assert TrainJob(steps=5).seconds is None
    assert TrainJob(steps=5, minutes=1).seconds == 60


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [
        (TrainJob(text=("no/such/file.txt",), ranks=2), UsageError, "no such file or folder"),
        (TrainJob(config="no/such.json", ranks=2), UsageError, "cannot be read"),
        (TrainJob(model="tinny", ranks=2), ModelError, "did you mean 'tiny'"),
    ],
)
def test_what_is_plainly_wrong_is_said_before_a_rank_starts(
    job: TrainJob, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        start(job)
    assert list(tmp_path.iterdir()) == []


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = TrainJob(text=("a", "b"), steps=3, learning_rate=0.1)
    job.save(tmp_path / "job.json")
    assert TrainJob.load(tmp_path / "job.json") == job


def test_a_resumed_run_has_the_model_and_text_of_the_run(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    out = str(tmp_path / "run")
    job = TrainJob(layers=1, hidden=16, sequence=12, experts=2, top_k=1, text=(str(text),), sample_tokens=0, out=out)
    assert start(replace(job, steps=1)) == 0
    assert start(TrainJob(resume=out, steps=2, sample_tokens=0)) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2]
    assert TrainJob.load(tmp_path / "run" / "job.json").experts == 2
    with pytest.raises(UsageError, match=r"is 1 layer of 16 with 2 experts, 1 per token, and .* with 4 experts"):
        start(TrainJob(resume=out, experts=4, steps=3))
    assert TrainJob.load(tmp_path / "run" / "job.json").experts == 2


class SavedTokenizer(ByteTokenizer):
    """Bytes, with a file."""

    fingerprint = "f00d"

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text("{}")


def test_the_tokenizer_is_saved_with_checkpoints_and_compared_at_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 40)
    out = str(tmp_path / "run")
    monkeypatch.setattr("shoal.cli.training.load_tokenizer", lambda path: SavedTokenizer())
    options: dict[str, Any] = {"text": (str(tmp_path / "text.txt"),), "sample_tokens": 0}
    assert start(TrainJob(layers=1, hidden=16, sequence=12, out=out, steps=2, save_every=1, **options)) == 0
    saved = tmp_path / "run" / "checkpoints"
    assert (saved / "tokenizer" / "tokenizer.json").read_text() == "{}"
    assert start(TrainJob(resume=out, steps=3)) == 0
    found = CliRunner().invoke(app, ["checkpoint", "list", out]).stdout
    assert "global_step3" in found
    assert "tokenizer" not in found
    monkeypatch.setattr("shoal.cli.training.load_tokenizer", lambda path: ByteTokenizer())
    with pytest.raises(
        UsageError, match=r"(?s)is of another tokenizer than bytes.*--tokenizer .*checkpoints/tokenizer"
    ):
        start(TrainJob(resume=out, steps=4))


def logged(folder: Path, name: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[name]) for line in lines if name in line]


def test_a_resumed_run_keeps_its_options_and_says_what_the_command_line_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    run = tmp_path / "run"
    job = TrainJob(
        layers=1, hidden=16, sequence=12, text=(str(text),), sample_tokens=0, out=str(run), stage=1, micro_batch=2,
        accumulation=2, clip=0.5, learning_rate=0.01, schedule="constant", seed=3, steps=4,
    )  # fmt: skip
    assert start(replace(job, out=str(tmp_path / "whole"))) == 0
    assert start(replace(job, steps=2)) == 0
    capsys.readouterr()
    assert start(TrainJob(resume=str(run), steps=4)) == 0
    assert f"--resume {run}: --steps 4 in place of 2\n" in capsys.readouterr().out
    for name in ("train/loss", "train/learning_rate", "train/gradient_norm"):
        assert logged(run, name) == logged(tmp_path / "whole", name)
    kept = json.loads((run / "run.json").read_text())
    assert kept["config"] == json.loads((tmp_path / "whole" / "run.json").read_text())["config"]

    before = (run / "metrics.jsonl").read_text()
    for again in (TrainJob(resume=str(run)), TrainJob(resume=str(run), steps=3)):
        assert start(again) == 0
        assert "nothing is left to do: the run is at step 4 and ends at step " in capsys.readouterr().out
    assert (run / "metrics.jsonl").read_text() == before

    assert start(TrainJob(resume=str(run), steps=6, learning_rate=0.02)) == 0
    said = capsys.readouterr().out
    assert "--steps 6 in place of 4, --learning-rate 0.02 in place of 0.01" in said
    assert "learning rate 0.02, constant after" in said
    assert logged(run, "train/learning_rate")[4:] == [(5, 0.02), (6, 0.02)]
    assert TrainJob.load(run / "job.json").accumulation == 2


def test_an_earlier_run_is_replaced_only_when_the_user_says_so(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    run = tmp_path / "run"
    job = TrainJob(layers=1, hidden=16, sequence=12, text=(str(text),), sample_tokens=0, out=str(run), steps=2)
    assert start(job) == 0
    with pytest.raises(UsageError, match=r"(?s)already contains a run \(job.json, checkpoints.*--overwrite"):
        start(job)
    assert [step for step, _ in logged(run, "train/loss")] == [1, 2]
    assert start(replace(job, steps=1), overwrites=True) == 0
    assert [step for step, _ in logged(run, "train/loss")] == [1]
    assert [path.name for path in (run / "checkpoints").glob("global*")] == ["global_step1"]


def test_ranks_after_a_script_that_does_not_take_them_are_reported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')")
    assert misplaced_ranks(str(script), ["--steps", "3"]) == ""
    assert "shoal run --ranks N" in misplaced_ranks(str(script), ["--ranks=2"])
    command = [sys.executable, "-m", "shoal", "run", script, "--ranks", "2"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert f"shoal: --ranks after {script} is an option of the script, which does not mention it." in result.stderr
    script.write_text("parser.add_argument('--ranks')")
    assert misplaced_ranks(str(script), ["--ranks", "2"]) == ""


def test_an_error_of_shoals_own_is_a_message_without_a_traceback() -> None:
    result = subprocess.run([sys.executable, "-m", "shoal", "report", "no/such"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "holds no run.json" in result.stderr
    assert "Traceback" not in result.stderr


def test_training_lowers_the_loss_and_leaves_logs_and_a_report(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 400)
    out = tmp_path / "run"
    job = TrainJob(
        model="nano",
        sequence=32,
        text=(str(text),),
        steps=20,
        validate_every=10,
        micro_batch=4,
        learning_rate=5e-3,
        sample_tokens=20,
        prompt="the ",
        out=str(out),
    )
    assert start(job) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    validation = [(line["step"], line["validation/loss"]) for line in lines if "validation/loss" in line]
    assert [step for step, _ in validation] == [0, 10, 20]
    assert validation[-1][1] < validation[0][1] - 2
    assert sum("train/loss" in line for line in lines) == 20
    assert (out / "csv" / "train_loss.csv").exists()
    assert list((out / "tensorboard").iterdir())
    record = json.loads((out / "run.json").read_text())
    assert record["prompt"] == "the "
    assert len(record["sample"]) > 0
    assert record["ledger"][-1][0] == "total"
    page = (out / "report.html").read_text()
    assert "</svg>" in page and "<td>productive</td>" in page
    shown = CliRunner().invoke(app, ["goodput", str(out)])
    assert shown.exit_code == 0 and re.match(r"goodput \d+\.\d%: 20 steps in [\d.,]+ s, 1 start\n", shown.output), (
        shown.output
    )
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["watch", "--once", str(out)])
    assert shown.exit_code == 0 and "step 20," in shown.output and "train/loss" in shown.output and "█" in shown.output
    assert "holds no metrics.jsonl" in str(CliRunner().invoke(app, ["watch", "--once", str(tmp_path)]).exception)
    read = json.loads(CliRunner().invoke(app, ["goodput", "--json", str(out / "goodput.jsonl")]).output)
    assert (read["steps"], read["starts"]) == (20, 1) and 0.0 < read["goodput"] < 1.0


def test_all_problems_of_sources_are_said_before_a_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jsonl").write_text("{\n")
    (tmp_path / "short.jsonl").write_text('{"text": "fish"}\n')
    with TokenFileWriter(tmp_path / "tokens", vocab_size=60_000) as writer:
        writer.write([50_000] * 2_000)
    names = ("broken.jsonl", "short.jsonl", "tokens", "missing.parquet", "none.txt")
    job = TrainJob(text=tuple(str(tmp_path / name) for name in names), sequence=256, ranks=2, out="run")
    with pytest.raises(UsageError) as caught:
        start(job)
    for words in (
        "line 1 of",
        "short.jsonl has 5 tokens; at least 514 are needed",
        "tokens has the token 50000; the model's are 0 to 255",
        "missing.parquet",
        "none.txt: no text file at",
    ):
        assert words in str(caught.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match=r"a\.txt', 'b\.txt': no such file or folder"):
        start(TrainJob(text=("a.txt", "b.txt"), ranks=2, out="run"))
