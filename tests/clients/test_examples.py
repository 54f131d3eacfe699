"""The examples for clients' packages, run as the guides say, and taken up again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
SECTION = str(EXAMPLES / "deepspeed_auto.json")


def run(*args: str, folder: Path, ranks: int = 2) -> list[float]:
    """The losses that it prints. ``ranks``: 0: the command starts them itself."""
    runner = [sys.executable, "-m", "shoal", "run", "--as-deepspeed", *(["--ranks", str(ranks)] if ranks else [])]
    done = subprocess.run(
        [*runner, *args],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(number) for number in re.findall(r"'?\bloss'?:? *'?(\d+\.\d+)", done.stdout)]


def test_the_trainer_example_learns_and_goes_on(tmp_path: Path) -> None:
    script = [str(EXAMPLES / "trainer.py"), "--deepspeed", SECTION]
    losses = run(*script, folder=tmp_path)
    assert losses[-1] < 0.8 * losses[0]
    assert run(*script, "--steps", "30", "--resume", folder=tmp_path)[0] < losses[0]


def test_the_accelerate_example_learns_and_goes_on(tmp_path: Path) -> None:
    flags = ["--use_deepspeed", "--zero_stage", "2", "--num_processes", "2"]
    script = ["accelerate", "launch", *flags, str(EXAMPLES / "accelerate_loop.py")]
    losses = run(*script, folder=tmp_path, ranks=0)
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert run(*script, "--resume", folder=tmp_path, ranks=0)[0] < losses[0]


def printed(script: str, *args: str, folder: Path, ranks: int = 2) -> str:
    """What an example prints, run as its page says."""
    command = [sys.executable, "-m", "shoal", "run", "--ranks", str(ranks), str(EXAMPLES / script), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def first_and_last(text: str) -> tuple[float, float]:
    match = re.search(r"loss ([0-9.]+) in the first step, ([0-9.]+) in the last", text)
    assert match is not None, text
    return float(match[1]), float(match[2])


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "small"
    make = [sys.executable, str(EXAMPLES / "make_small_llama.py"), str(folder)]
    subprocess.run(make, check=True, capture_output=True, timeout=100)
    return folder


def test_the_lora_example_learns_and_exports_the_adapter_and_a_merged_model(tmp_path: Path, small_llama: Path) -> None:
    text = str(EXAMPLES.parent / "docs" / "concepts")
    first, last = first_and_last(printed("lora.py", str(small_llama), "--text", text, "--steps", "16", folder=tmp_path))
    assert last < first - 0.05
    adapter = load_file(tmp_path / "lora-tuned" / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 16  # A and B of two linears in each of four layers
    assert all(tensor.any() for tensor in adapter.values())  # B begins as zeros
    base, merged = (load_file(path / "model.safetensors") for path in (small_llama, tmp_path / "lora-tuned" / "merged"))
    changed = {name.split(".")[-2] for name in base if not base[name].equal(merged[name])}
    assert changed == {"q_proj", "v_proj"}


def test_the_example_of_a_mixture_gives_the_losses_of_one_rank(tmp_path: Path) -> None:
    texts = {ep: printed("mixture.py", "--ep", str(ep), "--steps", "21", folder=tmp_path) for ep in (1, 2)}
    assert first_and_last(texts[2]) == pytest.approx(first_and_last(texts[1]), abs=2e-3)
    first, last = first_and_last(texts[2])
    assert last < 0.7 * first
    assert len(re.findall(r"tokens of each expert", texts[2])) == 2


def test_the_example_of_a_long_context_gives_the_losses_of_one_rank(tmp_path: Path) -> None:
    options = ["--length", "512", "--steps", "3"]
    alone = first_and_last(printed("long_context.py", *options, folder=tmp_path, ranks=1))
    for axis in ("--sp", "--cp"):
        losses = first_and_last(printed("long_context.py", axis, "2", *options, folder=tmp_path))
        assert losses == pytest.approx(alone, abs=2e-3)


def test_the_pre_training_example_goes_on_from_its_checkpoint_to_a_sample(tmp_path: Path) -> None:
    options = ["--text", str(EXAMPLES.parent / "docs" / "concepts"), "--out", "out"]
    assert "from step 0" in printed("pretrain.py", *options, "--steps", "30", folder=tmp_path)
    text = printed("pretrain.py", *options, "--steps", "32", folder=tmp_path)
    assert "from step 30" in text
    assert "after 32 steps" in text
    assert "The model" in text
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_the_example_of_custom_parts_gives_the_losses_of_one_rank(tmp_path: Path) -> None:
    def losses(*axes: str, ranks: int) -> list[float]:
        text = printed("custom_parts.py", *axes, folder=tmp_path, ranks=ranks)
        return [float(number) for number in re.findall(r"step +\d+  loss ([0-9.]+)", text)]

    alone = losses(ranks=1)
    assert len(alone) == 3
    assert alone[2] < 0.2 * alone[0]
    assert losses("--cp", "2", ranks=2) == pytest.approx(alone, abs=2e-4)
    assert losses("--tp", "2", "--pp", "2", ranks=4) == pytest.approx(alone, abs=2e-4)


def test_the_fine_tuning_example_learns_and_writes_a_folder_of_hugging_face(tmp_path: Path, small_llama: Path) -> None:
    text, config = EXAMPLES.parent / "docs" / "concepts", EXAMPLES / "fine_tune.json"
    options = [str(small_llama), "--text", str(text), "--config", str(config), "--steps", "4"]
    found = re.search(
        r"sequences: ([0-9.]+) before, ([0-9.]+) after 4 steps", printed("fine_tune.py", *options, folder=tmp_path)
    )
    assert found is not None
    assert float(found[2]) < 0.95 * float(found[1])
    written = load_file(tmp_path / "tuned" / "model.safetensors")
    assert sum(tensor.numel() for tensor in written.values()) > 3_000_000
    assert "model.layers.3.mlp.down_proj.weight" in written
    assert (tmp_path / "tuned" / "config.json").is_file()
