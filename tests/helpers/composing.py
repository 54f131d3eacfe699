"""A run as data: a layout, and a script of what is done between its micro-batches. ``play`` runs it and logs what
anybody can see, so that two layouts can be compared entry by entry.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.engine.engine import Engine

VOCABULARY = 11
HIDDEN = 6
NUM_BLOCKS = 3
TP_PLAN = {
    "embedding": "vocab",
    "blocks.*.inner": "column",
    "blocks.*.outer": "row",
    "frozen": "replicate",
    "head": "vocab_head",
}
WIRES: dict[str, dict[str, Any]] = {
    "gather": {"gather": "int8"},
    "reduce": {"reduce": "int8"},
    "feedback": {"reduce": "int8", "error_feedback": True},
    "difference": {"gather": "int8", "difference": True},
}
Action = tuple[Any, ...]


class _Bent(torch.autograd.Function):
    """Nothing forward; backward a factor, or an exception."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float | None) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.factor is None:
            raise ArithmeticError("backward was to fail")
        return gradients[0] * ctx.factor, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN + 1)
        self.outer = nn.Linear(HIDDEN + 1, HIDDEN, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x))) * self.scale


class Net(nn.Module):
    """A tied head, a frozen matrix, blocks of which a pass can leave one out or fail behind one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.frozen = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(
        self, tokens: torch.Tensor, without: int | None = None, fails: int | None = None, factor: float | None = 1.0
    ) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if index != without:
                x = block(x)
            if index == fails:
                raise ArithmeticError("forward was to fail")
            if index == 1 and factor != 1.0:
                x = _Bent.apply(x, factor)
        if self.training:
            self.num_calls += 1
        return self.head(self.frozen(x))


def _made() -> Net:
    torch.manual_seed(3)
    return Net()


@dataclass(frozen=True)
class Layout:
    """The tier of each kind of state, and the number of ranks.

    Args:
        hybrid: further keys of ``zero_optimization``.
        state: of ``none``, ``cpu``, ``ahead`` (``super_offload``), ``ratio``, ``nvme``; ``parameters``: of ``none``,
            ``cpu``, ``nvme``, ``some`` (``nvme``, the first of them on the host).
    """

    stage: int = 3
    size: int = 2
    hybrid: tuple[tuple[str, int], ...] = ()
    state: str = "none"
    parameters: str = "none"
    is_apart: bool = True
    tp: int = 1

    def plain(self) -> Layout:
        return replace(self, state="none", parameters="none", is_apart=False)


@dataclass(frozen=True)
class Case:
    """What is trained, and how; the same for every layout that is compared."""

    precision: str = "fp32"
    optimizer: str = "AdamW"
    accumulation: int = 1
    clip: float = 0.0
    recompute: str = "no"
    numbers: tuple[tuple[str, int], ...] = ()
    is_async: bool = False
    wire: str = "plain"
    is_sparse: bool = False
    # Per micro-batch: what comes before it, and what between its backward pass and step().
    script: tuple[tuple[tuple[Action, ...], tuple[Action, ...]], ...] = ()


def settings_of(case: Case, layout: Layout, folder: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": layout.stage, "stage3_param_persistence_threshold": 0, **dict(case.numbers)}
    zero |= dict(layout.hybrid)
    if layout.state in ("cpu", "ahead", "ratio"):
        zero["offload_optimizer"] = {"device": "cpu", "super_offload": layout.state == "ahead"}
        if layout.state == "ratio":
            zero["offload_optimizer"] |= {"ratio": 0.5, "super_offload": True}
    elif layout.state == "nvme":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
    if layout.parameters == "cpu":
        zero["offload_param"] = {"device": "cpu"}
    elif layout.parameters in ("nvme", "some"):
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": folder,
            "max_in_cpu": 0 if layout.parameters == "nvme" else 60,
        }
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "zero_optimization": zero,
        "units": {"classes": ["Block"]},
        "checkpoint": {"async_save": case.is_async},
        "parallel": {"tp": layout.tp, "tp_plan": TP_PLAN} if layout.tp > 1 else {},
    }
    if case.wire != "plain":
        found["wire"] = WIRES[case.wire]
    if case.is_sparse:
        found["sparse_gradients"] = True
    hyper: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.01}
    if case.optimizer == "momentum":
        found["optimizer"] = {"type": "SGD", "params": {**hyper, "momentum": 0.9}}
    elif not case.optimizer.startswith("client"):
        found["optimizer"] = {"type": case.optimizer, "params": hyper}
    if case.precision == "fp16":
        found["fp16"] = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 1}
    elif case.precision == "fp16 fixed":
        found["fp16"] = {"enabled": True, "loss_scale": 8}
    elif case.precision == "bf16":
        found["bf16"] = {"enabled": True}
    elif case.precision == "bf16 alone":
        found["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True}
    elif case.precision == "autocast":
        found["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if case.recompute != "no":
        found["activation_checkpointing"] = {"modules": ["Block"], "cpu_checkpointing": case.recompute == "host"}
    return found


@dataclass
class Played:
    """What one rank saw."""

    log: list[tuple[str, Any]] = field(default_factory=list)
    saved: dict[str, Any] | None = None  # the last checkpoint's values
    owners: list[weakref.ref[Any]] = field(default_factory=list)


class _Player:
    def __init__(self, case: Case, settings: dict[str, Any], folder: str) -> None:
        self.case, self.settings, self.folder = case, settings, folder
        self.played = Played()
        self.model: nn.Module = copy.deepcopy(MODEL)
        self.engine = self.start()
        self.tag: str | None = None
        self.num_saves = 0
        self.number = 0  # of the batch
        self.plan: dict[str, Any] = {}  # of the next forward

    def start(self) -> Engine:
        client = None
        if self.case.optimizer.startswith("client"):
            groups = [
                {"params": [p for n, p in self.model.named_parameters() if p.requires_grad and "scale" not in n]},
                {"params": [p for n, p in self.model.named_parameters() if "scale" in n], "weight_decay": 0.0},
            ]
            client = torch.optim.AdamW(groups, lr=0.05, foreach=self.case.optimizer == "client foreach", fused=False)
        engine, *_ = shoal.initialize(model=self.model, optimizer=client, config=self.settings)
        self.played.owners += [weakref.ref(o) for o in (engine, engine.sharded, engine.sharding.step)]
        self.played.owners += [weakref.ref(group) for group in engine.sharding.groups]
        return engine

    def note(self, label: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        self.played.log.append((label, value))

    def parameter(self, name: str) -> nn.Parameter:
        return dict(self.engine.module.named_parameters())[name]

    def shape(self, name: str) -> torch.Size:
        """Of the whole parameter, also where ranks have parts."""
        return MODEL.get_parameter(name).shape

    def forward(self) -> torch.Tensor:
        self.number += 1
        generator = torch.Generator().manual_seed(10 * self.number + self.engine.axes.batch.rank)
        tokens = torch.randint(VOCABULARY, (2, 4), generator=generator)
        plan, self.plan = self.plan, {}
        logits = self.engine(tokens, **plan).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def micro(self) -> None:
        """One micro-batch; one that was to fail is noted, and at the boundary made good by another."""
        try:
            self._micro()
        except (ArithmeticError, shoal.ShoalError) as error:
            if not isinstance(error, ArithmeticError) and not isinstance(error.__cause__, ArithmeticError):
                raise
            self.note("failed", str(error).splitlines()[0])
            if self.engine.is_gradient_accumulation_boundary():
                self._micro()

    def _micro(self) -> None:
        loss = self.forward()
        self.engine.backward(loss)
        self.note("loss", float(loss.detach()))

    def run(self) -> Played:
        for before, after in self.case.script:
            for action in before:
                self.act(action)
            self.micro()
            for action in after:
                self.act(action)
            accumulation = self.engine.accumulation
            if accumulation.is_boundary() and not accumulation.has_backward:
                self.micro()  # what was loaded is of a step of which every pass had failed
            self.engine.step()
            self.note("norm", self.engine.get_global_grad_norm())
            self.note("applied", self.engine.was_step_applied())
            self.note("scale", self.engine.loss_scale)
        while self.engine.accumulation.micro_in_step:  # to the end of the step
            self.micro()
            self.engine.step()
        self.all_values("end")
        self.save()
        self.engine.destroy()
        self.all_plain("destroyed")
        return self.played

    def values(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, parameter in self.engine.module.named_parameters():
            if not parameter.requires_grad:
                continue
            found[f"master {name}"] = self.engine.access.full_parameter(parameter)
            for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum"):
                value = self.engine.access.full_optimizer_state(parameter, key)
                found[f"{key} {name}"] = None if value is None else value.clone()
        return found | self.engine.module_state_dict()

    def all_values(self, label: str) -> None:
        for name, value in self.values().items():
            self.note(f"{label} {name}", value)

    def all_plain(self, label: str) -> None:
        for name, parameter in self.model.named_parameters():
            self.note(f"{label} {name}", parameter)

    def save(self) -> None:
        self.num_saves += 1
        self.tag = f"t{self.num_saves}"
        self.engine.save_checkpoint(self.folder, tag=self.tag)
        # Read after the save: an asynchronous one must hold what was there at the call all the same.
        self.played.saved = self.values() if not self.engine.accumulation.has_backward else None

    def act(self, action: Action) -> None:
        name, *rest = action
        getattr(self, f"_{name}")(*rest)

    # actions

    def _eval(self) -> None:
        self.engine.eval()
        with torch.no_grad():
            self.note("eval", self.engine(torch.arange(8).view(2, 4)).float())
        self.engine.train()

    def _no_sync(self) -> None:
        with self.engine.no_sync():
            self.micro()

    def _again(self) -> None:
        self.micro()

    def _zero(self) -> None:
        self.engine.zero_grad()
        self.micro()

    def _lr(self, value: float) -> None:
        self.engine.optimizer.param_groups[0]["lr"] = value

    def _get(self, name: str) -> None:
        parameter = self.parameter(name)
        access = self.engine.access
        self.note(f"master {name}", access.full_parameter(parameter))
        self.note(f"gradient {name}", access.full_gradient(parameter))
        self.note(f"local gradient {name}", access.local_gradient(parameter))
        for key in ("exp_avg", "momentum_buffer"):
            self.note(f"{key} {name}", access.full_optimizer_state(parameter, key))
        self.note(f"local {name}", access.local_parameter(parameter))

    def _set(self, name: str, value: float) -> None:
        parameter = self.parameter(name)
        self.engine.access.set_full_parameter(parameter, torch.full(self.shape(name), value))

    def _set_state(self, name: str, value: float) -> None:
        parameter = self.parameter(name)
        key = "momentum_buffer" if self.case.optimizer == "momentum" else "exp_avg"
        if self.engine.access.full_optimizer_state(parameter, key) is not None:
            self.engine.access.set_full_optimizer_state(parameter, key, torch.full(self.shape(name), value))

    def _set_gradient(self, name: str, value: float) -> None:
        parameter = self.parameter(name)
        if self.engine.access.full_gradient(parameter) is not None:
            self.engine.access.set_full_gradient(parameter, torch.full(self.shape(name), value))

    def _gathered(self, name: str, factor: float) -> None:
        parameter = self.parameter(name)
        with shoal.zero.GatheredParameters([parameter, self.parameter("frozen.weight")], modifier_rank=0):
            if self.engine.global_rank == 0:
                parameter.data.mul_(factor)
                self.parameter("frozen.weight").data.mul_(factor)

    def _offload(self, include: list[str] | None) -> None:
        self.engine.offload_states(include=include)
        self.engine.reload_states()

    def _empty(self) -> None:
        self.engine.empty_partition_cache()

    def _without(self, block: int) -> None:
        self.plan["without"] = block

    def _fails(self, block: int) -> None:
        self.plan["fails"] = block

    def _factor(self, factor: float | None) -> None:
        self.plan["factor"] = factor

    def _save(self) -> None:
        self.save()

    def _load(self) -> None:
        if self.tag is not None:
            self.engine.load_checkpoint(self.folder, tag=self.tag)

    def _state_dict(self) -> None:
        for name, value in self.engine.module_state_dict().items():
            self.note(f"state_dict {name}", value)

    def _load_module(self, factor: float) -> None:
        values = {
            name: value * factor if value.is_floating_point() else value
            for name, value in self.engine.module_state_dict().items()
        }
        self.engine.load_module_state_dict(values)

    def _ledger(self) -> None:
        nbytes: dict[str, int] = {}
        for entry in self.engine.memory_report().entries:
            assert entry.nbytes >= 0, entry
            nbytes[entry.kind] = nbytes.get(entry.kind, 0) + entry.nbytes
        self.note("ledger", nbytes.get("optimizer state", 0))

    def _anew(self) -> None:
        self.engine.destroy()
        self.engine = self.start()


def play(case: Case, layout: Layout, disk: Path, folder: Path, timeout: float = 60) -> list[Played]:
    """Run the script on every rank. Call it where ``make_apart`` says what the layout does."""
    disk.mkdir(parents=True, exist_ok=True)
    settings = settings_of(case, layout, str(disk))
    return run_ranks(layout.size, lambda: _Player(case, copy.deepcopy(settings), str(folder)).run(), timeout=timeout)


def load_into(case: Case, layout: Layout, disk: Path, folder: Path, tag: str | None = None) -> list[dict[str, Any]]:
    """What an engine of another layout has after loading, on each rank."""
    disk.mkdir(parents=True, exist_ok=True)
    settings = settings_of(case, layout, str(disk))

    def run() -> dict[str, Any]:
        player = _Player(case, copy.deepcopy(settings), str(folder))
        player.engine.load_checkpoint(folder, tag=tag)
        found = player.values()
        player.micro()
        player.engine.destroy()
        return found

    return run_ranks(layout.size, run)


def differences(plain: list[Played], away: list[Played]) -> list[str]:
    """Every entry of the log that is not the same to the bit."""
    found = []
    for rank, (one, other) in enumerate(zip(plain, away, strict=True)):
        if [label for label, _ in one.log] != [label for label, _ in other.log]:
            labels = zip((label for label, _ in one.log), (label for label, _ in other.log), strict=False)
            found.append(f"rank {rank}: other entries: {next((p for p in labels if p[0] != p[1]), 'more of them')}")
            continue
        for index, ((label, value), (_, theirs)) in enumerate(zip(one.log, other.log, strict=True)):
            if not same(value, theirs):
                found.append(f"rank {rank}, entry {index}: {label}: {value} and {theirs}")
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(torch.nan_to_num(one, 7.5), torch.nan_to_num(other, 7.5))
    if isinstance(one, float) and one != one:
        return bool(other != other)
    return type(one) is type(other) and bool(one == other)


MODEL = _made()  # ranks as threads share the generator, so that each must not draw values of its own
