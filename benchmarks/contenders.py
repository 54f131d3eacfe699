"""The contenders: one training step of one model, by plain PyTorch, its peers, and Shoal.

Every contender does the same work in a step: forward, backward, AdamW (fused, no clipping), gradients cleared. A
builder takes a `Task`, on a rank whose process group is up (except for one process alone), and returns the step to be
timed; the step returns its loss. Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[], Tensor]

LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Task:
    """What is to be trained. The defaults are the GPT of 34 M parameters that the documentation's tables speak of."""

    precision: str = "bf16"  # "fp32" or "bf16"
    sequences: int = 1  # per rank
    num_layers: int = 8
    hidden_size: int = 512
    num_heads: int = 8
    vocab_size: int = 8192
    sequence_length: int = 256
    small_layers: int = 0  # above 0: a chain of that many small linear layers in place of the GPT
    device: str = "cpu"
    zero: dict[str, Any] = field(default_factory=dict)  # more of Shoal's "zero_optimization"
    more: dict[str, Any] = field(default_factory=dict)  # more of Shoal's configuration
    is_recomputed: bool = False  # each block runs again in the backward pass
    is_meta: bool = False  # no whole copy of the model in host memory
    folder: str = ""  # on a disk, for offloaded state
    threads: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class SmallLayers(nn.Module):
    """Many small parameters: n linear layers of width 32, each with a bias, in blocks of ten layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(32, 32) for _ in range(min(10, num_layers - first))))
            for first in range(0, num_layers, 10)
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return nn.functional.mse_loss(inputs.float(), targets)


def build_model(task: Task) -> nn.Module:
    """The model in fp32, the same bits on every rank."""
    torch.manual_seed(0)
    if task.small_layers:
        return SmallLayers(task.small_layers)
    from shoal.models.gpt import GPT, GPTConfig

    shape = GPTConfig(
        vocab_size=task.vocab_size,
        sequence_length=task.sequence_length,
        num_layers=task.num_layers,
        hidden_size=task.hidden_size,
        num_heads=task.num_heads,
        tied=False,
    )
    with torch.device("meta" if task.is_meta else "cpu"):
        model = GPT(shape)
    if task.is_recomputed:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def build_batch(task: Task, rank: int) -> tuple[Tensor, Tensor]:
    """One batch, always the same on one rank, another on each: ``[sequences, sequence_length]`` tokens and targets."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if task.small_layers:
        inputs = torch.randn(task.sequences, 32, generator=generator)
        return inputs.to(task.device, task.dtype), (inputs * 0.5).to(task.device)
    shape = (task.sequences, task.sequence_length + 1)
    tokens = torch.randint(task.vocab_size, shape, generator=generator).to(task.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)


class MasterWeights:
    """fp32 master weights kept by hand beside a bf16 module: what a careful person writes without a library."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.optimizer = adamw(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_([master.grad for master in self.masters], [p.grad for p in self.parameters])
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)


def plain(task: Task, rank: int, size: int) -> Step:
    """PyTorch alone; in bf16 a bf16 module with fp32 master weights kept by hand."""
    return _local_step(task, rank, wrap=lambda model: model)


def plain_no_masters(task: Task, rank: int, size: int) -> Step:
    """PyTorch alone, parameters and optimizer state in the task's dtype: in bf16 small updates are lost."""
    model = build_model(task).to(task.device, task.dtype)
    return _simple_step(model, adamw(model.parameters()), build_batch(task, rank))


def plain_autocast(task: Task, rank: int, size: int) -> Step:
    """PyTorch alone, fp32 parameters and forward under bf16 autocast."""
    model = build_model(task).to(task.device)
    inputs, targets = build_batch(task, rank)
    optimizer = adamw(model.parameters())

    def step() -> Tensor:
        with torch.autocast(task.device, torch.bfloat16, enabled=task.precision == "bf16"):
            loss: Tensor = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def floor(task: Task, rank: int, size: int) -> Step:
    """What is left of a sharded step when communication is free: forward, backward, this rank's share of the optimizer.

    It trains nothing of use (each rank updates its own share of its own model).
    """
    model = build_model(task).to(task.device, task.dtype)
    batch = build_batch(task, rank)
    parameters = list(model.parameters())
    numel, share = 0, []
    for parameter in parameters:
        if numel * size < sum(p.numel() for p in parameters):
            share.append(parameter)
            numel += parameter.numel()
    weights: Any = adamw(share) if task.precision == "fp32" else MasterWeights(share)

    def step() -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        weights.step()
        model.zero_grad()
        return loss

    return step


def ddp(task: Task, rank: int, size: int) -> Step:
    """DistributedDataParallel with its default buckets; master weights as in `plain`."""
    from torch.nn.parallel import DistributedDataParallel

    return _local_step(task, rank, wrap=lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True))


def fsdp2_stage2(task: Task, rank: int, size: int) -> Step:
    return _fsdp2(task, rank, reshard_after_forward=False)


def fsdp2_stage3(task: Task, rank: int, size: int) -> Step:
    return _fsdp2(task, rank, reshard_after_forward=True)


def _fsdp2(task: Task, rank: int, reshard_after_forward: bool) -> Step:
    """``fully_shard`` per block and for the rest, bf16 parameters and reductions through MixedPrecisionPolicy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build_model(task).to(task.device)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        if task.precision == "bf16"
        else MixedPrecisionPolicy()
    )
    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    return _simple_step(model, adamw(model.parameters()), build_batch(task, rank))


def fsdp2_host(task: Task, rank: int, size: int) -> Step:
    """``fully_shard`` with ``CPUOffloadPolicy``: parameters, gradients, states and the update on the host, in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = build_model(task)
    mesh = init_device_mesh(task.device, (size,))
    wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": wide if task.precision == "bf16" else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=task.device != "cpu"),
    }
    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if task.is_meta:
        model.to_empty(device="cpu")
        fill(model, task.device)
    return _simple_step(model, adamw(model.parameters()), build_batch(task, rank))


@torch.no_grad()
def fill(model: nn.Module, device: str) -> None:
    """The GPT's initial values (other bits), drawn on ``device`` one parameter at a time."""
    for module in model.modules():
        std = float(getattr(module, "std", 0.02))
        for parameter in module.parameters(recurse=False):
            local: Any = parameter
            local = local.to_local() if hasattr(local, "to_local") else local
            local.copy_(torch.randn(local.shape, device=device).mul_(std) if local.dim() > 1 else torch.tensor(1.0))


def deepspeed_offload(task: Task, rank: int, size: int, stage: int, tier: str) -> Step:
    """ZeRO-Offload (``tier`` "cpu": ``DeepSpeedCPUAdam`` on the host) or ZeRO-Infinity (``tier`` "nvme")."""
    import deepspeed as library

    config = {
        "train_micro_batch_size_per_gpu": task.sequences,
        "gradient_clipping": 0,
        "bf16": {"enabled": task.precision == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": tier, "nvme_path": task.folder or None, "pin_memory": tier == "cpu"},
        },
        "steps_per_print": 10**9,
    }
    if task.is_meta:  # stages 1 and 2 want it whole on the device, in the format that it computes in
        model = build_model(task).to(task.dtype).to_empty(device=task.device)
        fill(model, task.device)
    else:
        model = build_model(task)
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)
    return EngineStep(engine, build_batch(task, rank))


def shoal_offload(task: Task, rank: int, size: int, stage: int, **section: Any) -> Step:
    """Shoal with optimizer state off the device."""
    if section["device"] == "nvme":
        section["nvme_path"] = task.folder
    zero = {"offload_optimizer": section} | task.zero
    return shoal(replace(task, zero=zero), rank, size, stage)


def deepspeed(task: Task, rank: int, size: int, stage: int) -> Step:
    """DeepSpeed with torch's fused AdamW as the client's optimizer, no clipping, all else at its defaults."""
    import deepspeed as library

    config = {
        "train_micro_batch_size_per_gpu": task.sequences,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0,
        "bf16": {"enabled": task.precision == "bf16"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    model = build_model(task)
    engine, *_ = library.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    return EngineStep(engine, build_batch(task, rank))


def shoal(task: Task, rank: int, size: int, stage: int) -> Step:
    """Shoal with AdamW from the configuration, no clipping, all else at its defaults."""
    import shoal as library

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.sequences,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage} | task.zero,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY},
        },
    }
    if task.precision == "bf16":
        config["bf16"] = {"enabled": True}
    for key, value in task.more.items():
        config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
    initialize: Any = library.initialize
    engine, *_ = initialize(model=build_model(task), config=config)
    return EngineStep(engine, build_batch(task, rank))


def _local_step(task: Task, rank: int, wrap: Callable[[nn.Module], nn.Module]) -> Step:
    model = wrap(build_model(task).to(task.device, task.dtype))
    batch = build_batch(task, rank)
    if task.precision == "fp32":
        return _simple_step(model, adamw(model.parameters()), batch)
    weights = MasterWeights(model.parameters())

    def step() -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        weights.step()
        model.zero_grad()
        return loss

    return step


def _simple_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Step:
    def step() -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


class EngineStep:
    """A step of an engine with ``backward()`` and ``step()``."""

    def __init__(self, engine: Any, batch: tuple[Tensor, Tensor]) -> None:
        self.engine = engine
        self.batch = batch

    def __call__(self) -> Tensor:
        loss: Tensor = self.engine(*self.batch)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def host_seconds(self) -> dict[str, float]:
        """Since it was made, where Shoal updates on the host: seconds of updates, and seconds waited for them."""
        sharding = getattr(self.engine, "sharding", None)
        cpu_optimizer = getattr(getattr(sharding, "step", None), "cpu_optimizer", None)
        if cpu_optimizer is None:
            return {}
        return {"updates": cpu_optimizer.update_seconds, "waited": cpu_optimizer.waited_seconds}


@dataclass(frozen=True)
class Contender:
    """A way to train, and how many processes it takes: one alone, or one a rank, with or without a process group."""

    build: Callable[..., Step]
    alone: bool = False
    joined: bool = True
    options: dict[str, Any] = field(default_factory=dict)


CONTENDERS: dict[str, Contender] = {
    "plain": Contender(plain, alone=True, joined=False),
    "plain-no-masters": Contender(plain_no_masters, alone=True, joined=False),
    "plain-autocast": Contender(plain_autocast, alone=True, joined=False),
    "plain-together": Contender(plain, joined=False),  # one a rank, at the same time, without a word between them
    "floor": Contender(floor, joined=False),
    "ddp": Contender(ddp),
    "fsdp2-stage2": Contender(fsdp2_stage2),
    "fsdp2-stage3": Contender(fsdp2_stage3),
    **{f"deepspeed-{stage}": Contender(deepspeed, options={"stage": stage}) for stage in (1, 2, 3)},
    "fsdp2-host": Contender(fsdp2_host),
    "deepspeed-host": Contender(deepspeed_offload, options={"stage": 2, "tier": "cpu"}),
    "deepspeed-disk": Contender(deepspeed_offload, options={"stage": 3, "tier": "nvme"}),
    "shoal-host": Contender(shoal_offload, options={"stage": 2, "device": "cpu"}),
    "shoal-host-ahead": Contender(shoal_offload, options={"stage": 2, "device": "cpu", "super_offload": True}),
    "shoal-disk": Contender(shoal_offload, options={"stage": 2, "device": "nvme"}),
    "shoal-3-disk": Contender(shoal_offload, options={"stage": 3, "device": "nvme"}),
    **{f"shoal-{stage}": Contender(shoal, options={"stage": stage}) for stage in (0, 1, 2, 3)},
}
