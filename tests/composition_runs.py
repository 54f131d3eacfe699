"""Trains one combination of the matrix on ranks, and on one process in plain PyTorch, on the same data."""

from __future__ import annotations

import copy
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import shoal
from shoal.comm.threads import run_ranks
from shoal.engine.engine import Engine
from tests.composition import Combination, Run, settings_of
from tests.ranks.test_offload import make_apart

STEPS = 5
VOCABULARY = 53  # as 50257, a number that neither ranks nor alignments divide
SEQUENCE = 5
ROWS = 2
NUM_BLOCKS = 3

Values = dict[str, torch.Tensor]


class Block(nn.Module):
    """Attention with fewer heads of keys and values than of queries, and a feed-forward layer of an odd width."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.heads, self.kv_heads = run.heads, run.kv_heads or run.heads
        hidden = 2 * run.heads
        self.norm = nn.LayerNorm(hidden)
        self.query = nn.Linear(hidden, hidden)
        self.keys_values = nn.Linear(hidden, 4 * self.kv_heads, bias=False)
        self.up = nn.Linear(hidden, 2 * hidden + 1)
        self.down = nn.Linear(2 * hidden + 1, hidden)
        self.scale = nn.Parameter(torch.empty(()))
        if run.spare == "unused":
            self.spare = nn.Parameter(torch.empty(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        rows, length = x.shape[:2]
        query = self.query(y).view(rows, length, self.heads, 2).transpose(1, 2)
        key, value = self.keys_values(y).view(rows, length, 2 * self.kv_heads, 2).transpose(1, 2).chunk(2, 1)
        repeats = self.heads // self.kv_heads
        scores = query @ key.repeat_interleave(repeats, 1).transpose(2, 3)
        mixed = torch.softmax(scores, -1) @ value.repeat_interleave(repeats, 1)
        x = x + mixed.transpose(1, 2).reshape(x.shape) * self.scale
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        hidden = 2 * run.heads
        self.is_block_used_twice = run.sharing == "twice"
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(run) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        if run.is_tied:
            self.head.weight = self.embedding.weight
        if run.sharing == "weight":
            self.blocks[2].up.weight = self.blocks[0].up.weight
        elif run.sharing == "module":
            self.blocks[2] = self.blocks[0]
        if run.spare == "unused":
            self.spare = nn.Linear(3, 3)
        elif run.spare == "frozen":
            self.blocks[1].requires_grad_(False)
            self.blocks[0].query.requires_grad_(False)
        # All values are drawn here, since ranks that are threads share torch's generator.
        generator = torch.Generator().manual_seed(0)
        with shoal.zero.GatheredParameters(list(self.parameters()), modifier_rank=0):
            for parameter in self.parameters():
                values = torch.rand(parameter.shape, generator=generator) - 0.5
                parameter.data.copy_(values if parameter.dim() < 2 else values * (6 / parameter.shape[-1]) ** 0.5)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks, *([self.blocks[0]] * self.is_block_used_twice)]:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def batch(index: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Micro-batch ``index`` of one rank."""
    generator = torch.Generator().manual_seed(100 * index + rank)
    rows = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def _client(section: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, section["type"])(parameters, **section["params"])


class _Trainer:
    """One rank's engine, driven as the combination says."""

    def __init__(self, settings: dict[str, Any], run: Run, folder: Path) -> None:
        self.settings, self.run, self.folder = settings, run, folder
        self.engine = self.start()

    def start(self) -> Engine:
        settings = copy.deepcopy(self.settings)
        with shoal.zero.Init(config_dict_or_path=settings) if self.run.is_early else nullcontext():
            model = Model(self.run)
        client = None
        if self.run.is_client:
            client = _client(settings.pop("optimizer"), [p for p in model.parameters() if p.requires_grad])
        return shoal.initialize(model=model, optimizer=client, config=settings)[0]

    def train(self) -> tuple[list[float], Values]:
        losses = []
        for step in range(STEPS):
            accumulation = self.engine.gradient_accumulation_steps()
            micro = range(step * accumulation, (step + 1) * accumulation)
            losses.append(sum(self.micro_step(index, index == micro[-1]) for index in micro) / accumulation)
            if step == 2:
                getattr(self, self.run.between)()
        parameters = dict(self.engine.module.named_parameters())
        access = self.engine.access
        values = {name: access.full_parameter(p).clone().float() for name, p in parameters.items() if access.knows(p)}
        self.engine.destroy()
        return losses, values

    def micro_step(self, index: int, is_last: bool) -> float:
        engine = self.engine
        with engine.no_sync() if self.run.style == "no_sync" and not is_last else nullcontext():
            loss = engine(*batch(index, engine.global_rank))
            if self.run.style == "loss":
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
        engine.step()
        return float(loss.detach())

    def nothing(self) -> None:
        return

    def evaluate(self) -> None:
        with torch.no_grad():
            self.engine(*batch(99, self.engine.global_rank))

    def offload_states(self) -> None:
        self.engine.offload_states()
        self.engine.reload_states()

    def resume(self) -> None:
        self.engine.save_checkpoint(self.folder, tag="middle")
        self.engine.destroy()
        self.engine = self.start()
        self.engine.load_checkpoint(self.folder, tag="middle")


def train(settings: dict[str, Any], run: Run) -> list[tuple[list[float], Values]]:
    """The losses and main parameters of each rank."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, pytest.MonkeyPatch.context() as patch:
        make_apart(patch, run.is_host_separate)
        settings = copy.deepcopy(settings)
        for section in settings["zero_optimization"].values():
            if isinstance(section, dict) and section.get("device") == "nvme":
                section["nvme_path"] = name
        return run_ranks(run.ranks, lambda: _Trainer(settings, run, Path(name) / "checkpoint").train())


def train_alone(settings: dict[str, Any], run: Run) -> tuple[list[float], Values]:
    """Plain PyTorch: each micro-batch of each rank in the compute dtype, sums and update in that of main parameters."""
    model, dtype = Model(run), getattr(torch, run.dtype)
    if run.is_early:  # zero.Init makes the parameters in the config's dtype
        model.to(dtype)
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    main = {
        name: nn.Parameter(p.detach().clone().to(torch.float32 if run.has_main else dtype)) for name, p in names.items()
    }
    model.to(dtype)
    optimizer = _client(settings["optimizer"], list(main.values()))
    accumulation = settings.get("gradient_accumulation_steps", 1)
    num = run.ranks * accumulation
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            for rank in range(run.ranks):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=run.autocast):
                    loss = model(*batch(step * accumulation + micro, rank))
                (loss * (run.scale / accumulation)).backward()
                total += float(loss.detach()) / num
                for name, parameter in names.items():
                    if parameter.grad is not None:
                        gradient = (parameter.grad.float() / (run.scale * run.ranks)).to(main[name].dtype)
                        held = main[name].grad
                        main[name].grad = gradient if held is None else held + gradient
                        parameter.grad = None
        if clip := settings.get("gradient_clipping"):
            nn.utils.clip_grad_norm_(main.values(), clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in names.items():
                parameter.copy_(main[name])
        losses.append(total)
    return losses, {name: values.detach().float() for name, values in main.items()}


def relative_difference(ours: Values, theirs: Values) -> tuple[float, str]:
    """The largest difference of a parameter, relative to its largest value, and its name. NaN is infinitely far."""
    assert sorted(ours) == sorted(theirs)
    found = []
    for name, values in ours.items():
        far = float((values - theirs[name]).abs().max() / theirs[name].abs().max())
        found.append((far if far == far else float("inf"), name))
    return max(found)


def check(combination: Combination) -> None:
    """Assert that all ranks end alike, and where one process in plain PyTorch ends."""
    settings, run = settings_of(combination)
    results = train(settings, run)
    losses, parameters = train_alone(settings, run)
    for rank, (_, values) in enumerate(results[1:], 1):
        different = [name for name, value in values.items() if not torch.equal(value, results[0][1][name])]
        assert not different, f"rank {rank} differs from rank 0 in {different}"
    far, name = relative_difference(results[0][1], parameters)
    assert far <= run.bound, f"{name} is {far:.3g} away, of {run.bound:g}; {settings}"
    means = [sum(values) / run.ranks for values in zip(*(each[0] for each in results), strict=True)]
    assert means == pytest.approx(losses, rel=run.bound * 10), settings
