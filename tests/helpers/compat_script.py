"""A script as DeepSpeed's users write it; the tests start it on ranks for which ``import deepspeed`` is Shoal.

It trains the same small model in several ways, one engine after the other, and rank 0 writes the losses to a file.
"""

from __future__ import annotations

import argparse
import json

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

STEPS = 4


def make_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step. Shapes: [8, 8], [8, 4]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)


def config(stage: int, **more: object) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
        **more,
    }


def adamw(lr: float = 1e-2) -> dict[str, object]:
    return {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.1}}


def train(engine: deepspeed.DeepSpeedEngine, style: str = "engine") -> list[float]:
    losses = []
    rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    for step in range(STEPS):
        x, y = (part.chunk(size)[rank].to(engine.device) for part in batch(step))
        loss = torch.nn.functional.mse_loss(engine(x), y)
        if style == "engine":
            engine.backward(loss)
        else:
            loss.backward()
        engine.step()
        whole = loss.detach().clone()
        deepspeed.comm.all_reduce(whole)
        losses.append(whole.item() / size)
    engine.destroy()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out")
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    found = {}

    model = make_model()
    engine, optimizer, loader, schedule = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters()
    )
    assert loader is None and schedule is None and optimizer is engine.optimizer
    found["config file, generator"] = train(engine)

    model = make_model()
    trained = filter(lambda p: p.requires_grad, model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config(3, optimizer=adamw()))
    found["config optimizer, filter"] = train(engine)

    model = make_model()
    groups = [{"params": list(model[0].parameters()), "lr": 5e-2}, {"params": list(model[2].parameters())}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config(2, optimizer=adamw()))
    found["config optimizer, groups"] = train(engine)

    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=sgd, config_params=config(1))
    assert isinstance(optimizer, torch.optim.Optimizer) and engine.zero_optimization_stage() == 1
    found["client optimizer"] = train(engine)

    model = make_model()
    engine, _, _, schedule = deepspeed.initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2),
        model_parameters=model.parameters(),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        config=config(3),
    )
    found["callables"] = train(engine)
    found["callables, rates"] = schedule.get_last_lr()

    model = make_model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(2, optimizer=adamw())
    )
    found["loss.backward()"] = train(engine, "torch")

    model = make_model()
    host = DeepSpeedCPUAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    offload = config(2)
    offload["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}  # type: ignore[index]
    engine, *_ = deepspeed.initialize(model=model, optimizer=host, config=offload)
    found["DeepSpeedCPUAdam, offload"] = train(engine)

    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = make_model()
    first, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(3, optimizer=adamw())
    )
    other = make_model()
    second, *_ = deepspeed.initialize(
        model=other, model_parameters=other.parameters(), config=config(1, optimizer=adamw())
    )
    found["two engines at a time"] = train(second)
    found["zero.Init"] = train(first)

    if args.local_rank == 0:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
