"""Trains one combination of the matrix on ranks, and on one process in plain PyTorch, on the same data."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import shoal
from shoal.comm.formats import FORMATS
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.engine.engine import Engine
from shoal.optim.build import build
from shoal.optim.one_bit import OneBitAdam
from shoal.optim.sums_values import OwnValues
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.grouped import add_bias_of_experts, grouped_linear
from shoal.parallel.expert.held import ExpertsHeld, SplitDim, Stack
from shoal.parallel.expert.huggingface import StackRows
from shoal.parallel.loss import count_tokens
from shoal.parallel.low_precision.recipes import RECIPES, Recipe
from shoal.parallel.sequence.chunks import Documents
from shoal.sharding import encoded_state
from tests.helpers.backward_threads import run_in_threads
from tests.helpers.compiling import CountsGraphs, compiling, overwriting
from tests.helpers.composition import Combination, Run, on_disk, settings_of
from tests.helpers.exact_format import Exact
from tests.ranks.offload.test_offload import make_apart

VOCABULARY = 53  # as 50257, a number that neither ranks nor alignments divide
SEQUENCE = 8
ROWS = 2

Values = dict[str, torch.Tensor]
CPU = torch.device("cpu")


class Experts(nn.Module):
    """Two experts of each token; which ones, its position says, so that rounding does not change the choice."""

    def __init__(self, hidden: int, num_experts: int) -> None:
        super().__init__()
        inner = hidden + 4  # of which half is an odd number
        self.up = nn.Parameter(torch.empty(num_experts, hidden, inner))
        self.down = nn.Parameter(torch.empty(num_experts, inner, hidden))
        self.bias = nn.Parameter(torch.empty(num_experts, hidden))
        self.rows = StackRows(self._compute)
        split_dims = {"up": SplitDim(2), "down": SplitDim(1)}
        self.experts_held = ExpertsHeld(num_experts, stack=Stack(split_dims, "rows"))

    def forward(self, x: torch.Tensor, scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if positions.shape[-1] > x.shape[1]:  # between split layers this tensor-parallel rank has a part of them
            world = current_world()
            positions = positions.split(x.shape[1], -1)[world.mesh.index("tp", world.rank)]
        first = positions % 3
        index = torch.stack([first, first + 1 - 2 * (first > 0).long()], -1).expand(len(x), -1, -1).flatten(0, 1)
        weights = scores.flatten(0, 1).gather(1, index).softmax(-1, dtype=torch.float32)

        return run_experts(x.flatten(0, 1), index, weights.to(x.dtype), self.rows, self.experts_held).view(x.shape)

    def _compute(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        held = self.experts_held
        inner = functional.gelu(grouped_linear(held.enter(rows), self.up, counts))
        out = held.leave(grouped_linear(inner, self.down, counts))
        return add_bias_of_experts(out, self.bias, counts)


class Transposed(torch.autograd.Function):
    """The same values; they and their gradients are stored with the last two dims exchanged."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.mT.contiguous().mT

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.mT.contiguous().mT


def transposed(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Transposed.apply(x)
    return found


def unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


Tables = tuple[torch.Tensor, torch.Tensor]


class Rotary(nn.Module):
    """Rotary positions. Their only frequency is no number of 16 bits."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.tensor([0.7]), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Tables:
        """Cosines and sines in the dtype of ``x``. Shape: [positions, 1], or [rows, 1, positions, 1]."""
        positions = positions if positions.dim() == 1 else positions[:, None]
        angles = positions[..., None].float() * self.frequencies.float()
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: torch.Tensor, tables: Tables) -> torch.Tensor:
    cos, sin = tables
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Block(nn.Module):
    """Attention with fewer heads of keys and values than of queries, and a feed-forward layer of an odd width."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.head_size = 2
        self.stored: Callable[[torch.Tensor], torch.Tensor] = transposed if run.is_transposed else unchanged
        hidden, keys = 2 * run.heads, 2 * (run.kv_heads or run.heads)
        self.norm = nn.LayerNorm(hidden)
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        inner = 2 * hidden + run.spare_width
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        if run.is_transposed:
            self.down.weight = nn.Parameter(torch.empty(inner, hidden).t())
        self.scale = nn.Parameter(torch.empty(()))
        if run.experts:
            self.router = nn.Linear(hidden, run.experts, bias=False)
            self.experts = Experts(hidden, run.experts)
        if run.spare == "unused":
            self.spare = nn.Parameter(torch.empty(3))

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        tables: Tables | None,
        documents: Documents | torch.Tensor | None,
    ) -> torch.Tensor:
        stored = self.stored
        y = stored(self.norm(stored(x)))
        query, key, value = (
            stored(stored(projected).unflatten(-1, (-1, self.head_size)).transpose(1, 2))
            for projected in (self.q_proj(y), self.k_proj(y), self.v_proj(y))
        )
        if tables is not None:
            query, key = rotate(query, tables), rotate(key, tables)
        if isinstance(documents, torch.Tensor) and documents.dim() == 4:  # a mask, of the process alone
            mixed = functional.scaled_dot_product_attention(query, key, value, documents, enable_gqa=True)
        else:
            mixed = shoal.attention(query, key, value, is_causal=True, documents=documents)
        x = stored(x + stored(self.o_proj(stored(stored(mixed).transpose(1, 2).flatten(2)))) * self.scale)
        y = stored(self.down(stored(functional.gelu(stored(self.up(x))))))
        if hasattr(self, "experts"):
            y = y + stored(self.experts(x, stored(self.router(x)), positions))
        return stored(x + y)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Model(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        hidden = 2 * run.heads
        self.stored: Callable[[torch.Tensor], torch.Tensor] = transposed if run.is_transposed else unchanged
        self.is_block_used_twice = run.sharing == "twice"
        self.loss_function = cross_entropy
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(SEQUENCE, hidden)
        self.rotary = Rotary() if run.is_rotary else None
        self.blocks = nn.ModuleList(Block(run) for _ in range(run.blocks))
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
            self.blocks[0].q_proj.requires_grad_(False)
        # All values are drawn here, since ranks that are threads share torch's generator.
        generator = torch.Generator().manual_seed(0)
        with shoal.zero.GatheredParameters(list(self.parameters()), modifier_rank=0):
            for parameter in self.parameters():
                values = torch.rand(parameter.shape, generator=generator) - 0.5
                if not parameter.dim():
                    values = values + 1  # differences are compared with the value, which must not be near zero
                parameter.data.copy_(values if parameter.dim() < 2 else values * (6 / parameter.shape[-1]) ** 0.5)

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor,
        documents: Documents | torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(positions)
        tables = None if self.rotary is None else self.rotary(x, positions)
        for block in [*self.blocks, *([self.blocks[0]] * self.is_block_used_twice)]:
            x = block(x, positions, tables, documents)
        return self.loss_function(self.stored(self.head(self.stored(x))), targets)


def batch(run: Run, index: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Tokens, targets and positions of micro-batch ``index`` of one data-parallel rank; of packed ones also numbers of
    documents.
    """
    generator = torch.Generator().manual_seed(100 * index + rank)
    rows = torch.randint(0, VOCABULARY, (ROWS + (run.is_varying and index % 2), SEQUENCE + 1), generator=generator)
    targets = rows[:, 1:].clone()
    if run.is_ragged:  # the first row has a target for every part of the sequence
        targets[1:][torch.rand(targets[1:].shape, generator=generator) < 0.6] = -100
    if run.documents == "one":
        return rows[:, :-1], targets, torch.arange(SEQUENCE)
    begins = torch.rand(targets.shape, generator=generator) < 0.2
    begins[:, 0] = True
    places = torch.arange(SEQUENCE).expand_as(begins)
    positions = places - torch.where(begins, places, 0).cummax(1).values
    return rows[:, :-1], targets, positions, begins.cumsum(1)


class AloneOneBit(OneBitAdam):
    """One process is all ranks: its own momentum is their mean."""

    def step(self, closure: Any = None) -> None:
        if self.sums() == "values":
            group = self.param_groups[0]
            self.to_sum([OwnValues(p, group, p.grad) for p in group["params"] if p.grad is not None])
        super().step()
        self.num_steps += 1


def _client(section: dict[str, Any], parameters: Any, names: Sequence[str] = ()) -> torch.optim.Optimizer:
    if section["type"] in ("Muon", "Lamb"):
        by_id = {id(parameter): name for parameter, name in zip(parameters, names, strict=True)}
        return build(section["type"], section["params"], parameters, names=by_id)[0]
    if section["type"] == "OneBitAdam":
        return AloneOneBit(parameters, **section["params"])
    return getattr(torch.optim, section["type"])(parameters, **section["params"])


class Trainer:
    """One rank's engine, driven as the combination says."""

    def __init__(self, settings: dict[str, Any], run: Run, folder: Path, backend: CountsGraphs) -> None:
        self.settings, self.run, self.folder, self.backend = settings, run, folder, backend
        self.device = current_world().device
        self.engine = self.start()

    def start(self) -> Engine:
        settings = copy.deepcopy(self.settings)
        with shoal.zero.Init(config_dict_or_path=settings) if self.run.is_early else nullcontext():
            model = Model(self.run)
        if self.run.is_cast:
            model.to(getattr(torch, self.run.dtype))
        client = None
        if self.run.is_client:
            client = _client(settings.pop("optimizer"), [p for p in model.parameters() if p.requires_grad])
        for module in {"no": [], "blocks": model.blocks, "model": [model]}[self.run.compiled]:
            module.compile(backend=self.backend, dynamic=False)
        return shoal.initialize(model=model, optimizer=client, config=settings)[0]

    def train(self) -> tuple[torch.Tensor, Values]:
        """For each step the sum of weighted losses and of their weights; and the main parameters."""
        losses = []
        for step in range(self.run.steps):
            losses.append(self.step(step))
            if step == 1:
                getattr(self, self.run.between)()
        parameters = dict(self.engine.module.named_parameters())
        access = self.engine.access
        values = {name: access.full_parameter(p).float().cpu() for name, p in parameters.items() if access.knows(p)}
        values = {name: value.clone() for name, value in values.items()}
        self.engine.destroy()
        return torch.stack(losses).cpu(), values

    def step(self, number: int) -> torch.Tensor:
        """The sum of weighted losses of a step, and of their weights. Shape: [2]."""
        accumulation = self.engine.gradient_accumulation_steps()
        micro = range(number * accumulation, (number + 1) * accumulation)
        if self.is_pipeline:
            loss = self.engine.train_batch(self.batch(index) for index in micro)
            return torch.stack([loss.double(), torch.ones_like(loss)])
        return reduce(torch.add, (self.micro_step(index, index == micro[-1]) for index in micro))

    @property
    def is_pipeline(self) -> bool:
        """Is a step one call of ``train_batch``? The other styles are refused."""
        return self.run.pp > 1 and self.run.style == "engine"

    def micro_step(self, index: int, is_last: bool) -> torch.Tensor:
        """The loss, times its weight in the step's loss, and the weight. Shape: [2]."""
        engine = self.engine
        inputs = self.batch(index)
        count = count_tokens(inputs[1])
        tokens = {"num_tokens": count} if self.run.is_ragged else {}
        with engine.no_sync() if self.run.style == "no_sync" and not is_last else nullcontext():
            loss = engine(*inputs)
            if self.run.style == "loss":
                engine.scale(loss, **tokens).backward()
            else:
                engine.backward(loss, **tokens)
        engine.step()
        weight = count if self.run.is_ragged else torch.ones_like(count)
        return torch.stack([loss.detach().double() * weight, weight])

    def batch(self, index: int) -> tuple[Any, ...]:
        context = self.engine.sequence_context or shoal.SequenceContext()
        drawn = batch(self.run, index, self.engine.axes.batch.rank)
        documents = Documents.from_ids(drawn[3]).balanced() if self.run.documents == "packed" else None
        sharded = tuple(context.shard(tensor.to(self.device), tensor.dim() - 1, documents) for tensor in drawn)
        return sharded if documents is None else (*sharded[:3], documents)

    def nothing(self) -> None:
        return

    def evaluate(self) -> None:
        if self.is_pipeline:
            self.engine.eval_batch(iter([self.batch(99)]), num_micro_batches=1)
            return
        with torch.no_grad():
            self.engine(*self.batch(99))

    def offload_states(self) -> None:
        self.engine.offload_states()
        self.engine.reload_states()

    def resume(self) -> None:
        self.engine.save_checkpoint(self.folder, tag="middle")
        self.engine.destroy()
        self.engine = self.start()
        self.engine.load_checkpoint(self.folder, tag="middle")


def train(settings: dict[str, Any], run: Run, device: torch.device = CPU) -> list[tuple[torch.Tensor, Values]]:
    """The losses and main parameters of each rank; all ranks compute on ``device``."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, pytest.MonkeyPatch.context() as patch:
        make_apart(patch, run.is_host_separate if device == CPU else None)
        if run.is_backward_apart:
            run_in_threads(patch)
        settings = on_disk(settings, name)
        backend = CountsGraphs(overwriting)
        with compiling() if run.compiled != "no" else nullcontext():
            folder = Path(name) / "checkpoint"

            def job() -> tuple[torch.Tensor, Values]:
                # Autocast has one cache for all threads, which a rank empties when its forward ends: a weight that
                # another rank uses twice would then be cast twice.
                torch.set_autocast_cache_enabled(False)
                return Trainer(settings, run, folder, backend).train()

            for form in ("int8", "1bit"):
                patch.setitem(FORMATS, form, lambda _block: Exact())
            patch.setitem(RECIPES, "rowwise", Recipe(None, None, None))
            patch.setattr(encoded_state, "BLOCK", 1)
            patch.setattr(encoded_state, "_SCALE", torch.float32)
            # Ranks that are threads compile one after the other.
            results = run_ranks(run.world_size, job, device=device, timeout=180 if run.compiled != "no" else 60)
        if run.compiled != "no" and "activation_checkpointing" not in settings:  # recomputed segments run uncompiled
            assert backend.num_graphs > 0
        return results


def train_alone(settings: dict[str, Any], run: Run, device: torch.device = CPU) -> tuple[list[float], Values]:
    """Plain PyTorch: each micro-batch of each rank in the compute dtype, sums and update in that of main parameters."""
    model, dtype = Model(run).to(device), getattr(torch, run.dtype)
    if run.is_early or run.is_cast:  # zero.Init makes the parameters in the config's dtype
        model.to(dtype)
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    main = {
        name: nn.Parameter(p.detach().clone().to(torch.float32 if run.has_main else dtype)) for name, p in names.items()
    }
    model.to(dtype)
    optimizer = _client(settings["optimizer"], list(main.values()), list(main))
    accumulation = settings.get("gradient_accumulation_steps", 1)
    losses = []
    for step in range(run.steps):
        total = 0.0
        micro_steps = [step * accumulation + micro for micro in range(accumulation)]
        num = sum(int(count_tokens(batch(run, index, rank)[1])) for index in micro_steps for rank in range(run.ranks))
        for index in micro_steps:
            for rank in range(run.ranks):
                inputs = [tensor.to(device) for tensor in batch(run, index, rank)]
                inputs[3:] = [(ids[:, None, :, None] == ids[:, None, None]).tril() for ids in inputs[3:]]
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=run.autocast):
                    loss = model(*inputs)
                # A mean over micro-batches, of which each counts alike; over tokens it is one of all of them.
                share = int(count_tokens(inputs[1])) / num if run.is_ragged else 1 / len(micro_steps) / run.ranks
                (loss * (run.scale * run.ranks * share)).backward()
                total += float(loss.detach()) * share
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
    return losses, {name: values.detach().float().cpu() for name, values in main.items()}


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
    check_run(*settings_of(combination))


def check_run(settings: dict[str, Any], run: Run, device: torch.device = CPU, slack: float = 1.0) -> None:
    """As ``check``, of settings.

    Args:
        slack: a factor of the bounds, which are those of the CPU's kernels.
    """
    bound = run.bound * slack
    results = train(settings, run, device)
    losses, parameters = train_alone(settings, run, device)
    everywhere: Values = {}
    for rank, (_, values) in enumerate(results):  # of a pipeline each rank has some
        common = {name: value for name, value in values.items() if name in everywhere}
        before = {name: everywhere[name] for name in common}
        if run.compiled != "no":
            # Ranks that are threads share torch.compiler.is_compiling(): while one of them compiles, the optimizer of
            # another computes with tensors in place of numbers, which may round otherwise.
            far = relative_difference(common, before)[0] if common else 0.0
            assert far <= bound, f"rank {rank} differs from ranks before it"
        else:
            different = [name for name, value in common.items() if not torch.equal(value, before[name])]
            assert not different, f"rank {rank} differs from ranks before it in {different}"
        everywhere |= values
    far, name = relative_difference(everywhere, parameters)
    assert far <= bound, f"{name} is {far:.3g} away, of {bound:g}; {settings}"
    sums = torch.stack([each[0] for each in results]).sum(0)
    assert (sums[:, 0] / sums[:, 1]).tolist() == pytest.approx(losses, rel=bound * 10), settings
