"""Runs that DeepSpeed began, saved, and that go on in Shoal: of Trainer, Accelerate, Lightning, and of tensor
parallelism.

Under DeepSpeed itself a case trains on past its checkpoint, and puts the checkpoint into the folder that
SHOAL_CONTINUED_FOLDER names (tests/fixtures/clients/continued). Under Shoal it resumes from what lies there.
"""

from __future__ import annotations

import os
import sys
import warnings
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.clients.scripts import accelerate_cases, trainer_making
from tests.clients.scripts.common import Case, Sequences, gpt2, mean_over_ranks, run_cases

MADE = Path(__file__).resolve().parent.parent.parent / "fixtures" / "clients" / "continued"
IS_SHOAL = "+shoal" in version("deepspeed")
SMALL: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2}

# Trains, saves to a folder and trains on, or only goes on from a folder. Returns: what it showed after the checkpoint.
Run = Callable[[Path, bool], dict[str, list[float]]]


def continued(name: str, run: Run) -> Case:
    def case(folder: Path) -> dict[str, Any]:
        place = folder / "run"
        is_first = int(os.environ["RANK"]) == 0
        if IS_SHOAL and is_first:
            with zipfile.ZipFile(MADE / f"{name}.zip") as archive:
                archive.extractall(place)
        _meet()
        curves = run(place, not IS_SHOAL)
        _meet()
        if not IS_SHOAL and is_first:
            out = Path(os.environ["SHOAL_CONTINUED_FOLDER"])
            out.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(out / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
                for file in sorted(path for path in place.rglob("*") if path.is_file() and path.suffix != ".py"):
                    archive.write(file, file.relative_to(place))
        return {"curves": curves}

    return case


def _meet() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def trainer(config: Any) -> Run:
    def run(place: Path, is_whole: bool) -> dict[str, list[float]]:
        where = {"output_dir": str(place), "save_strategy": "steps", "save_steps": 3, "save_total_limit": None}
        if is_whole:
            made = trainer_making.trainer_of(trainer_making.arguments(place, config, **where), gpt2(**SMALL))
            made.train()
            _keep_only(place / "checkpoint-3")
        else:
            args = trainer_making.arguments(place, config, **where)
            made = trainer_making.trainer_of(args, gpt2(seed=99, **SMALL))
            made.train(resume_from_checkpoint=str(place / "checkpoint-3"))
        curves = made.curves()
        return {"loss": curves["loss"][-6:], "norm": curves["norm"][-3:], "lr": curves["lr"][-3:]}

    return run


def accelerated(stage: int) -> Run:
    def run(place: Path, is_whole: bool) -> dict[str, list[float]]:
        accelerator = accelerate_cases.accelerator_for(accelerate_cases.auto_config(stage))
        model = gpt2(**SMALL) if is_whole else gpt2(seed=99, **SMALL)
        parts = accelerate_cases.dummies(accelerator, model)
        if is_whole:
            accelerate_cases.train(accelerator, *parts, steps=3)
            accelerator.save_state(str(place))
        else:
            accelerator.load_state(str(place))
        return accelerate_cases.train(accelerator, *parts, steps=3, skip=6).result()

    return run


def lit(stage: int) -> Run:
    def run(place: Path, is_whole: bool) -> dict[str, list[float]]:
        from tests.clients.scripts import lightning_cases

        lightning_cases.HIDDEN = 8
        if is_whole:
            model = lightning_cases.Classifier(late=False, optimizer="adamw")
            first = lightning_cases.trainer(stage, "32-true", 2)
            first.fit(model, lightning_cases.loader(1), lightning_cases.loader(2))
            first.save_checkpoint(place)
        again = lightning_cases.Classifier(late=False, optimizer="adamw")
        second = lightning_cases.trainer(stage, "32-true", 3)
        loaders = (lightning_cases.loader(1), lightning_cases.loader(2))
        second.fit(again, *loaders, ckpt_path=place, weights_only=False)
        return {"loss": again.losses, "lr": again.lrs}

    return run


def tensor_parallel(stage: int) -> Run:
    """DeepSpeed splits the layers over both ranks, and converts; Shoal has them whole, and the same rows on both."""

    def run(place: Path, is_whole: bool) -> dict[str, list[float]]:
        import deepspeed
        from transformers import LlamaConfig, LlamaForCausalLM

        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "gradient_clipping": 1.0,
        }
        config |= {"tensor_parallel": {"autotp_size": 2}} if is_whole else {"checkpoint": {"load_universal": True}}
        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 2}
        torch.manual_seed(17 if is_whole else 99)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=1, tie_word_embeddings=False, **sizes))
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        rows = Sequences(12).rows
        losses: list[float] = []

        def train(first: int) -> None:
            for step in range(first, first + 3):
                batch = rows[2 * step : 2 * step + 2]
                loss = engine(input_ids=batch, labels=batch).loss
                engine.backward(loss)
                engine.step()
                losses.append(mean_over_ranks(float(loss)))

        if is_whole:
            train(0)
            engine.save_checkpoint(str(place), tag="split")
            if int(os.environ["RANK"]) == 0:
                _convert(place / "split", place / "whole")
            _keep_only(place / "whole")
        else:
            engine.load_checkpoint(str(place), tag="whole")
        train(3)
        engine.destroy()
        return {"loss": losses[-3:]}

    return run


def _convert(source: Path, target: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    settings = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    places = {"input_folder": str(source), "output_folder": str(target)}
    main(SimpleNamespace(**places, **settings, inject_missing_state=True))


def _keep_only(folder: Path) -> None:
    """Later checkpoints are not looked at."""
    _meet()
    if int(os.environ["RANK"]) == 0:
        import shutil

        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other) if other.is_dir() else other.unlink()
    _meet()


RUNS = {
    "trainer-stage2": trainer(trainer_making.bare(2)),
    "trainer-stage3": trainer(trainer_making.small_stage3()),
    "accelerate-stage1": accelerated(1),
    "accelerate-stage3": accelerated(3),
    "lightning-stage2": lit(2),
    "lightning-stage3": lit(3),
    "tensor-parallel-stage1": tensor_parallel(1),
    "tensor-parallel-stage3": tensor_parallel(3),
}
CASES = {name: continued(name, run) for name, run in RUNS.items()}

if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")
    run_cases(CASES, sys.argv[1:], trainer_making.reset)
