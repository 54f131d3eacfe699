"""The peers of `parallel.py`: the same model split by DTensor's ``parallelize_module`` and by DeepSpeed's AutoTP."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[], float]  # forward and backward; returns the loss


def step_of(model: nn.Module, forward: Callable[[], Tensor]) -> Step:
    def step() -> float:
        loss = forward()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return float(loss.detach())

    return step


def dtensor(
    model: Any, tokens: Tensor, targets: Tensor, size: int, *, sequence_parallel: bool, loss_parallel: bool
) -> Step:
    """DTensor's parallelize_module in eager mode."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from torch.distributed.tensor.parallel import (
        loss_parallel as loss_parallel_context,
    )

    between = Shard(1) if sequence_parallel else Replicate()
    of_layer: dict[str, Any] = {
        "attention": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "feed_forward": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        **{f"attention.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
        "attention.o_proj": RowwiseParallel(output_layouts=between),
        "feed_forward.down_proj": RowwiseParallel(output_layouts=between),
    }
    of_model: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    if sequence_parallel:
        of_layer |= {"attention_norm": SequenceParallel(), "feed_forward_norm": SequenceParallel()}
        of_model |= {"norm": SequenceParallel()}
    mesh = init_device_mesh("cpu", (size,))
    parallelize_module(model, mesh, of_model)
    for layer in model.layers:
        parallelize_module(layer, mesh, of_layer)
    step = step_of(model, lambda: F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))

    def in_context() -> float:
        with loss_parallel_context():
            return step()

    return in_context if loss_parallel else step


def autotp(model: Any, tokens: Tensor, targets: Tensor, size: int, *, loss_parallel: bool) -> Step:
    """DeepSpeed's AutoTP: the layers of its plan for Llama.

    The model is called as AutoTP made it, without the engine, whose own work is not part of a step here.
    """
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # DeepSpeed reads it
    deepspeed.init_distributed("gloo")
    column = {"patterns": [r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight$"], "partition_type": "column"}
    row = {"patterns": [r".*\.(o_proj|down_proj)\.weight$"], "partition_type": "row"}
    head = {"patterns": [r"lm_head\.weight$"], "partition_type": "column", "gather_output": True}
    config = {
        "train_micro_batch_size_per_gpu": len(tokens),
        "zero_optimization": {"stage": 0},
        "steps_per_print": 10**9,
        "tensor_parallel": {
            "autotp_size": size,
            "vocab_parallel_lm_head": loss_parallel,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [column, row] if loss_parallel else [column, row, head],
            },
        },
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    made = engine.module
    if loss_parallel:
        return step_of(made, lambda: made.loss_function(made(tokens), shift_labels=targets))
    return step_of(made, lambda: F.cross_entropy(made(tokens).flatten(0, 1), targets.flatten()))
