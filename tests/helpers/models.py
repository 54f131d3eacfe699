"""A zoo of small models: each does one thing that real models do and that sharding could get wrong.

All take ``(tokens [rows, SEQUENCE], targets [rows, SEQUENCE])`` and return a loss, unless they say otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 13
SEQUENCE = 5
HIDDEN = 12  # divides by 2, 3 and 4 ranks, not by 5; no size here is a multiple of the layout's alignment


class Block(nn.Module):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    """Embedding, blocks, norm, a tied head, and a module that is never used."""

    block: type[nn.Module] = Block

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList([type(self).block(hidden) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(self.embedding(tokens))))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        return cross_entropy(self.logits(tokens), targets)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Checkpointed(Plain):
    """Recomputes each block in backward."""

    is_reentrant = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    is_reentrant = True


class CheckpointedInside(Plain):
    """Recomputes a part of each block, so that the recomputation starts inside a unit."""

    class Inner(Block):
        is_reentrant = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(checkpoint(self.part, x, use_reentrant=self.is_reentrant))

        def part(self, x: torch.Tensor) -> torch.Tensor:
            return functional.gelu(self.up(self.norm(x)))

    block = Inner


class CheckpointedInsideReentrant(CheckpointedInside):
    class InnerReentrant(CheckpointedInside.Inner):
        is_reentrant = True

    block = InnerReentrant


class Lora(nn.Module):
    """A frozen weight and a trained update of low rank."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.frozen = nn.Linear(hidden, hidden)
        self.frozen.requires_grad_(False)
        self.low = nn.Linear(hidden, 2, bias=False)
        self.high = nn.Linear(2, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.frozen(x) + self.high(self.low(x)))


class Adapted(Plain):
    """LoRA: only the adapters are trained; embedding and head are frozen."""

    block = Lora

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__(num_blocks, hidden)
        self.embedding.requires_grad_(False)
        self.norm.requires_grad_(False)
        self.unused.requires_grad_(False)


class AdaptedCheckpointed(Adapted):
    is_reentrant = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_() if self.is_reentrant else x
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x


class AdaptedCheckpointedReentrant(AdaptedCheckpointed):
    is_reentrant = True


class FrozenBlocks(Plain):
    """Blocks without a trained parameter, between trained ones: their weights are read in backward all the same."""

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__(num_blocks, hidden)
        self.blocks[1].requires_grad_(False)
        self.blocks[-1].requires_grad_(False)


class FrozenBottom(Plain):
    """Nothing below the last block is trained, so no gradient flows into it."""

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__(num_blocks, hidden)
        self.head.weight = nn.Parameter(self.embedding.weight.detach().clone())
        self.embedding.requires_grad_(False)
        for block in self.blocks[:-1]:
            block.requires_grad_(False)


class Twice(Plain):
    """Every block is called twice in a step."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(super().body(x))


class Shared(Plain):
    """One block object at three places of the list."""

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__(num_blocks, hidden)
        self.blocks[2] = self.blocks[0]


class TiedBetweenBlocks(Plain):
    """Two blocks share one weight, so it belongs to neither."""

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__(num_blocks, hidden)
        self.blocks[2].up.weight = self.blocks[0].up.weight


class ReadsOthers(Plain):
    """The root reads parameters of other modules without calling these."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.body(self.embedding(tokens))
        x = x + self.blocks[0].down.bias + functional.linear(x, self.blocks[1].up.weight[:HIDDEN])
        return cross_entropy(self.norm(x) @ self.embedding.weight.T, targets)


class BlockReadsOther(Plain):
    """A block reads its neighbour's weight."""

    class Reader(Block):
        other: list[nn.Module]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x + functional.linear(x, self.other[0].up.weight[:HIDDEN]) if self.other else x

    block = Reader

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__(num_blocks, hidden)
        for index, block in enumerate(self.blocks):
            block.other = [self.blocks[index - 1]] if index else []


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extras: list[dict[str, torch.Tensor]]


class Holder:
    """A plain object with tensors in its attributes."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class ReturnsDataclasses(Plain):
    """Blocks take and return dataclasses."""

    class DataBlock(Block):
        def forward(self, x: Output) -> Output:  # type: ignore[override]
            hidden = super().forward(x.hidden)
            return Output(hidden, [{"mean": hidden.square().mean()}])

    block = DataBlock

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, extra = Output(self.embedding(tokens), []), torch.zeros(())
        for block in self.blocks:
            x = block(x)
            extra = extra + x.extras[0]["mean"]
        return cross_entropy(self.head(self.norm(x.hidden)), targets) + extra


class Pair(NamedTuple):
    hidden: torch.Tensor
    mean: torch.Tensor


class ReturnsTuplesDictsObjects(Plain):
    """Blocks return a named tuple, a dict, and an object of a class of the user's."""

    class Various(Block):
        kind = 0

        def forward(self, x: torch.Tensor) -> Any:
            hidden = super().forward(x)
            if self.kind == 0:
                return Pair(hidden, hidden.square().mean())
            return {"hidden": hidden, "none": None} if self.kind == 1 else Holder(hidden)

    block = Various

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__(num_blocks, hidden)
        for kind, block in enumerate(self.blocks):
            block.kind = kind

    def body(self, x: torch.Tensor) -> torch.Tensor:
        pair = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](pair.hidden)["hidden"] + pair.mean).hidden


class KeepsAuxiliaryLoss(Plain):
    """A router's loss is kept on the module, not returned; its weights are read for nothing else."""

    class Routed(Block):
        def __init__(self, hidden: int = HIDDEN) -> None:
            super().__init__(hidden)
            self.router = nn.Linear(hidden, 4)
            self.score = nn.Linear(4, 1)
            self.auxiliary: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.auxiliary = self.score(torch.tanh(self.router(x))).square().mean()
            return super().forward(x)

    block = Routed

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, targets) + sum(block.auxiliary for block in self.blocks)


class Branching(Plain):
    """Whether the middle block runs depends on the data, so ranks differ."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(tokens))
        if int(tokens[0, 0]) % 2:
            x = self.blocks[1](x)
        return cross_entropy(self.head(self.norm(self.blocks[2](x))), targets)


class BranchingInsideUnit(Plain):
    """Which of two experts runs depends on the data; both lie in one unit."""

    class Mixture(Block):
        def __init__(self, hidden: int = HIDDEN) -> None:
            super().__init__(hidden)
            self.experts = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = int(x[0, 0, 0] > 0)
            return super().forward(x) + self.experts[chosen](x)

    block = Mixture


class SeveralDtypes(Plain):
    """fp32, fp64 and bf16 parameters in each block."""

    class Mixed(Block):
        def __init__(self, hidden: int = HIDDEN) -> None:
            super().__init__(hidden)
            self.wide = nn.Parameter(torch.linspace(-0.1, 0.1, hidden, dtype=torch.float64))
            self.narrow = nn.Parameter(torch.linspace(-0.1, 0.1, hidden).to(torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (x * self.wide).to(x.dtype) + x * self.narrow.to(x.dtype)

    block = Mixed


class OddParameters(Plain):
    """One-element, 0-d and empty parameters, and one whose size divides by nothing."""

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__(num_blocks, hidden)
        self.one = nn.Parameter(torch.full((1,), 0.5))
        self.scalar = nn.Parameter(torch.tensor(0.25))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.odd = nn.Parameter(torch.linspace(-0.1, 0.1, 131))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.logits(tokens) * (self.one + self.odd[VOCABULARY:].mean()) + self.empty.sum()
        return cross_entropy(logits + self.scalar * self.odd[:VOCABULARY], targets)


class Late(Plain):
    """The extra layer joins at the step when ``is_joined`` is set: until then it gets no gradient."""

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__(num_blocks, hidden)
        self.extra = nn.Linear(hidden, hidden)
        self.is_joined = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = super().body(x)
        return x + self.extra(x) if self.is_joined else x


class WithBuffers(Plain):
    """A buffer that every rank must start with alike."""

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__(num_blocks, hidden)
        self.register_buffer("shift", torch.rand(hidden))
        self.register_buffer("mask", torch.rand(hidden) > 0.5)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x + (self.shift * self.mask).to(x.dtype))


class PenalisesGradient(Plain):
    """The loss contains a gradient, so backward reads every weight twice. The blocks run again after that gradient."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        loss = cross_entropy(self.head(self.norm(self.body(x))), targets)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum() + self.body(x).square().mean()


class Chunked(Plain):
    """Recomputes two blocks at once."""

    is_reentrant = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        def both(x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x))

        return self.blocks[2](checkpoint(both, x, use_reentrant=self.is_reentrant))


class ChunkedReentrant(Chunked):
    is_reentrant = True


class FrozenIntegers(Plain):
    """Frozen int8 and boolean parameters, as quantized models have."""

    class Quantized(Block):
        def __init__(self, hidden: int = HIDDEN) -> None:
            super().__init__(hidden)
            self.codes = nn.Parameter(torch.randint(-5, 5, (hidden, hidden), dtype=torch.int8), requires_grad=False)
            self.mask = nn.Parameter(torch.ones(hidden, dtype=torch.bool), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x @ (self.codes.to(x.dtype) / 50) * self.mask

    block = Quantized


class Recurrent(Plain):
    """An LSTM keeps a list of its own of its parameters."""

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__(num_blocks, hidden)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(self.lstm(x)[0])


class NotContiguous(Plain):
    """Weights that are views of a transposed tensor."""

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__(num_blocks, hidden)
        for block in self.blocks:
            block.up.weight = nn.Parameter(torch.randn(hidden, 2 * hidden).t() * 0.1)


class Normalised(Plain):
    """Batch norm: buffers of floats and of an integer, that forward changes."""

    def __init__(self, num_blocks: int = 3, hidden: int = HIDDEN) -> None:
        super().__init__(num_blocks, hidden)
        self.batch_norm = nn.BatchNorm1d(hidden)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


class Attacks(Plain):
    """Takes a gradient of its input by the way (an adversarial example) and goes on with the disturbed input."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        y = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(self.head(self.norm(self.body(y))), targets), y)
        return cross_entropy(self.head(self.norm(self.body(x + 0.1 * gradient.tanh()))), targets)


class TwiceCheckpointed(Plain):
    """One block at two places, recomputed at each: its gradient is complete twice."""

    is_reentrant = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 0, 2, 1):
            x = checkpoint(self.blocks[index], x, use_reentrant=self.is_reentrant)
        return x


class TwiceCheckpointedReentrant(TwiceCheckpointed):
    is_reentrant = True
