"""Ray Train's TorchTrainer: two workers on CPU, each of which calls deepspeed.initialize as Ray's guide does.

Where WORLD_SIZE is set, each process is one of the workers already, without Ray: so DeepSpeed's curve is recorded.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH, ROWS, STEPS = 16, 4, 8


def loop(settings: dict[str, Any]) -> None:
    """One worker's training; the first writes its losses."""
    import deepspeed

    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": settings["stage"]},
        },
    )
    losses = []
    for index in range(STEPS):
        generator = torch.Generator().manual_seed(10 * index + engine.global_rank)
        x = torch.randn(ROWS, WIDTH, generator=generator)
        loss = (engine(x) - x.flip(-1)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if engine.global_rank == 0:
        made_by = deepspeed.__version__
        Path(settings["out"]).write_text(json.dumps({"losses": losses, "version": made_by, "world": engine.world_size}))
    engine.destroy()


def with_ray(settings: dict[str, Any]) -> None:
    """The same by Ray's workers, processes that Ray starts."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    trainer = TorchTrainer(
        loop,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(Path(settings["out"]).parent / "ray")),
    )
    trainer.fit()
    ray.shutdown()


def main() -> None:
    shared = Path(os.environ["SHOAL_CASES_FOLDER"])
    for name in sys.argv[1:] or ["stage2", "stage3"]:
        settings = {"stage": int(name.removeprefix("stage")), "out": str(shared / f"{name}.json")}
        if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
            loop(settings)
        else:
            with_ray(settings)
        if int(os.environ.get("RANK", "0")) == 0:
            found = json.loads(Path(settings["out"]).read_text())
            is_shoal = "shoal" in found["version"]
            result = {"case": name, "curves": {"loss": found["losses"]}, "facts": {"world": found["world"]}}
            print("RESULT " + json.dumps({**result, "is Shoal": is_shoal}), flush=True)


if __name__ == "__main__":
    main()
