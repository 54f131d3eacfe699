"""Bytes that a transformer layer receives and holds on each rank: tensor parallelism in 1-D, 2-D, 2.5-D and 3-D.

    python -m benchmarks.parallel_bytes --tokens 8192 --hidden 4096 --ranks 4 8 16 64

By formula (``shoal.parallel.tensor.grid``). Up to 8 ranks the bytes received, and those of the weights, are first
compared with what a layer of the same proportions sends on ranks that are threads: a difference is an error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.arena import table
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import ConfigError
from shoal.mesh import Mesh
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.tensor import parallelize
from shoal.parallel.tensor.grid import Grid, GridKind, LayerCost, LayerShape, TensorParallelKind, grid_shape, layer_cost
from shoal.parallel.tensor.grid_apply import parallelize_grid

KINDS: tuple[TensorParallelKind, ...] = ("1d", "1d-sequence", *get_args(GridKind))
MEASURED_RANKS = 8  # at most


def costs(kind: TensorParallelKind, size: int, shape: LayerShape) -> LayerCost | None:
    """The costs; None: the ranks are no such grid."""
    try:
        return layer_cost(kind, size, shape)
    except ConfigError:
        return None


def measure(kind: TensorParallelKind, size: int, shape: LayerShape) -> set[tuple[int, int]]:
    """Bytes received and held of weights by the ranks for one layer, forward and backward."""
    batch = 4
    config = GPTConfig(size, shape.tokens // batch, 1, shape.hidden, 8)

    def on_a_rank() -> tuple[int, int]:
        world, model = current_world(), GPT(config)
        mesh = Mesh.of(size, tp=size)
        if kind == "1d" or kind == "1d-sequence":
            parallelize(model, world.communicator("tp", mesh), sequence_parallel=kind == "1d-sequence")
        else:
            parallelize_grid(model, Grid.open(world, mesh, kind))
        with world.recorder.recording() as entries:
            model(torch.zeros(batch, config.sequence_length, dtype=torch.int64)).sum().backward()
        received = sum(entry.nbytes for entry in entries if entry.label.startswith("blocks.0."))
        return received, sum(parameter.nbytes for parameter in model.blocks.parameters())

    return set(run_ranks(size, on_a_rank))


def run(ranks: list[int], shape: LayerShape) -> list[dict[str, Any]]:
    """A row for each kind and number of ranks.

    Raises: AssertionError: a formula differs from what was measured.
    """
    small = LayerShape(tokens=64, hidden=128, feed_forward=512)
    rows = []
    for size in ranks:
        for kind in KINDS:
            cost = costs(kind, size, shape)
            if cost is None:
                continue
            measured = size <= MEASURED_RANKS
            if measured:
                formula = layer_cost(kind, size, small)
                found = measure(kind, size, small)
                assert found == {(formula.received, formula.weights)}, (kind, size, found, formula)
            # startswith() does not narrow the kind to that of a grid.
            grid = "" if kind.startswith("1d") else "x".join(map(str, grid_shape(kind, size)))  # type: ignore[arg-type]
            rows.append({"ranks": size, "kind": kind, "grid": grid, "measured": measured, **vars(cost)})
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    lines = [["kind", "ranks", "grid", "received MiB", "weights MiB", "activations MiB", "gathered MiB", "checked"]]
    for row in rows:
        sizes = [f"{row[key] / 2**20:.1f}" for key in ("received", "weights", "activations", "gathered")]
        lines.append([row["kind"], str(row["ranks"]), row["grid"], *sizes, "yes" if row["measured"] else ""])
    return table(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--itemsize", type=int, default=2, help="bytes of an element of weights and activations")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 64])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    rows = run(given.ranks, LayerShape(given.tokens, given.hidden, 4 * given.hidden, given.itemsize))
    print(show(rows))
    if given.out:
        given.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
