"""Shapes of a GPT: by name, or the one nearest to a number of parameters.

>>> named_config("124m").num_parameters()
123587328
>>> parse_count("10M"), parse_count("1.5b"), parse_count("4096")
(10000000, 1500000000, 4096)
"""

from __future__ import annotations

import dataclasses
import difflib
import math

from shoal.errors import ModelError
from shoal.models.gpt import GPTConfig

# The vocabulary of the larger shapes is GPT-2's 50,257 rounded up to a multiple of 128, which divides well.
NAMED_SHAPES: dict[str, GPTConfig] = {
    "nano": GPTConfig(256, 64, num_layers=2, hidden_size=64, num_heads=2),
    "tiny": GPTConfig(256, 128, num_layers=4, hidden_size=128, num_heads=4),
    "mini": GPTConfig(256, 256, num_layers=6, hidden_size=256, num_heads=4),
    "small-34m": GPTConfig(8192, 256, num_layers=8, hidden_size=512, num_heads=8, tied=False),
    "124m": GPTConfig(50304, 1024, num_layers=12, hidden_size=768, num_heads=12),
    "350m": GPTConfig(50304, 1024, num_layers=24, hidden_size=1024, num_heads=16),
    "774m": GPTConfig(50304, 1024, num_layers=36, hidden_size=1280, num_heads=20),
    "1.5b": GPTConfig(50304, 1024, num_layers=48, hidden_size=1600, num_heads=25),
    "2.7b": GPTConfig(50304, 2048, num_layers=32, hidden_size=2560, num_heads=32),
    "6.7b": GPTConfig(50304, 2048, num_layers=32, hidden_size=4096, num_heads=32),
    "13b": GPTConfig(50304, 2048, num_layers=40, hidden_size=5120, num_heads=40),
    "30b": GPTConfig(50304, 2048, num_layers=48, hidden_size=7168, num_heads=56),
    "66b": GPTConfig(50304, 2048, num_layers=64, hidden_size=9216, num_heads=72),
    "175b": GPTConfig(50304, 2048, num_layers=96, hidden_size=12288, num_heads=96),
}

_WIDTH_PER_LAYER = 64  # hidden size over layers of GPT-2's and GPT-3's smaller shapes
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def named_config(name: str, *, vocab_size: int | None = None, sequence_length: int | None = None) -> GPTConfig:
    """The shape of that name, with another vocabulary or sequence length where given.

    Raises: ModelError: no shape has the name.
    """
    shape = NAMED_SHAPES.get(name.lower())
    if shape is None:
        near = difflib.get_close_matches(name.lower(), NAMED_SHAPES, n=1, cutoff=0.5)
        raise ModelError(
            f"no model shape is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else "."),
            do=f"take one of {', '.join(NAMED_SHAPES)}, or a number of parameters such as 10M.",
        )
    return dataclasses.replace(
        shape,
        vocab_size=shape.vocab_size if vocab_size is None else vocab_size,
        sequence_length=shape.sequence_length if sequence_length is None else sequence_length,
    )


def nearest_config(
    num_parameters: int, *, vocab_size: int = 256, sequence_length: int = 256, tied: bool = True
) -> GPTConfig:
    """The shape, of usual proportions, whose number of parameters is nearest.

    Widths are multiples of 64 (of 16 below 128); heads have 64 elements (32 in models narrower than 256, 16 below 64).
    A shape may be up to twice as deep or as wide as usual if that comes nearer.

    Raises: ModelError: so few parameters that no shape comes within a factor of 2.
    """
    best: tuple[float, GPTConfig] | None = None
    for hidden in [16, 32, 48, 64, 80, 96, 112, *range(128, 32768, 64)]:
        usual = hidden / _WIDTH_PER_LAYER
        head_size = 64 if hidden >= 256 and hidden % 64 == 0 else 32 if hidden % 32 == 0 else 16
        for layers in range(max(1, math.floor(usual / 2)), math.ceil(usual * 2) + 1):
            shape = GPTConfig(vocab_size, sequence_length, layers, hidden, hidden // head_size, tied)
            distance = abs(math.log(shape.num_parameters() / num_parameters))
            cost = distance + 0.02 * abs(math.log(layers / usual))
            if best is None or cost < best[0]:
                best = (cost, shape)
        if 12 * hidden**2 * max(1, math.floor(usual / 2)) > 2 * num_parameters:
            break
    assert best is not None
    if not 0.5 <= best[1].num_parameters() / num_parameters <= 2:
        raise ModelError(
            f"no shape with a vocabulary of {vocab_size} has about {num_parameters} parameters; "
            f"the nearest has {best[1].num_parameters()}.",
            do="ask for more parameters, or take a smaller vocabulary.",
        )
    return best[1]


def parse_count(text: str) -> int:
    """A number with an optional suffix k, m, b or t (thousand to 10 ** 12), in either case.

    Raises: ModelError: it is no such number, or not positive.
    """
    cleaned = text.strip().lower().replace("_", "").replace(",", "")
    factor = _SUFFIXES.get(cleaned[-1:], 1)
    digits = cleaned[:-1] if factor > 1 else cleaned
    try:
        count = round(float(digits) * factor)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ModelError(f"{text!r} is not a number of parameters.", do="write it as 4096, 10M or 1.5B.")
    return count
