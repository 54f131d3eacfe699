"""``shoal schedule``: print a pipeline schedule, with what it costs, and draw it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def schedule(
    name: Annotated[
        str,
        typer.Argument(
            help="gpipe, 1f1b, interleaved_1f1b, interleaved_zero_bubble, zb_h1, zbv, dualpipev, forward, or a file: "
            "one line a rank, as 0F0 0F1 0B0."
        ),
    ],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Pipeline-parallel ranks.")] = 4,
    micro: Annotated[int, typer.Option(min=1, help="Micro-batches of one step.")] = 8,
    virtual_stages: Annotated[int, typer.Option(min=1, help="Pipeline stages of one rank.")] = 1,
    forward: Annotated[float, typer.Option(min=0, help="Time of a forward.")] = 1.0,
    backward: Annotated[float, typer.Option(min=0, help="Time of a backward; I and W take half of it each.")] = 2.0,
    send: Annotated[float, typer.Option(min=0, help="Time of a transfer to another rank.")] = 0.0,
    actions: Annotated[bool, typer.Option(help="Also print sends, receives and reductions.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Draw the schedule to this SVG file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for chrome://tracing and Perfetto.")] = None,
) -> None:
    """Print a pipeline schedule: what each rank computes when, the bubble, and the activations that each rank holds."""
    from shoal.pipeline import draw
    from shoal.pipeline.lower import lower
    from shoal.pipeline.schedule import build_schedule
    from shoal.pipeline.simulate import simulate, validate

    chosen = build_schedule(name, ranks, micro, virtual_stages=virtual_stages)
    validate(chosen)
    timeline = simulate(chosen, forward, backward, backward / 2, backward / 2, send)
    print(draw.grid(simulate(chosen, backward=1.0)))
    if actions:
        print("\n" + "\n".join(" ".join(map(str, order)) for order in lower(chosen)))
    print(f"\nbubble             {timeline.bubble:.1%} of the time to the last rank's end")
    print(f"bubble of a rank   {timeline.own_bubble:.1%}, at most, of the time from its own start to its own end")
    print(f"peak activations   {', '.join(map(str, timeline.peak_activations))} micro-batches by rank", end="")
    print(", one stage's each" if chosen.num_stages > chosen.num_ranks else "")
    for path, text in ((svg, draw.svg), (trace, draw.chrome_trace)):
        if path is not None:
            path.write_text(text(timeline), encoding="utf-8")
            print(f"wrote {path}")
