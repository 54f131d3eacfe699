"""The commands and their options. Each body imports what it needs, so that ``--help`` waits for nothing."""

from __future__ import annotations

import inspect
import json as json_text
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from shoal.cli.as_deepspeed import as_deepspeed
from shoal.cli.checkpoint import app as checkpoint_app
from shoal.cli.convert import convert
from shoal.cli.data import app as data_app
from shoal.cli.estimate import estimate
from shoal.cli.job import TrainJob
from shoal.cli.plan import plan, tune
from shoal.cli.run import run
from shoal.cli.usage import OrderedGroup, UsageCommand
from shoal.cli.verify import verify

app = typer.Typer(
    name="shoal",
    cls=OrderedGroup,
    help="Train PyTorch models that are too large or too slow for one device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(data_app, name="data")
app.command("run", cls=UsageCommand, context_settings={"allow_interspersed_args": False})(run)
app.command("estimate", cls=UsageCommand)(estimate)
app.command("plan", cls=UsageCommand)(plan)
app.command("tune", cls=UsageCommand)(tune)
app.command("verify", cls=UsageCommand)(verify)
app.command("convert", cls=UsageCommand)(convert)
app.command("as-deepspeed", cls=UsageCommand)(as_deepspeed)


def _show_version(value: bool) -> None:
    if value:
        import shoal

        print(f"shoal {shoal.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(
    "deepspeed",
    cls=UsageCommand,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
    options_metavar="[OPTIONS] SCRIPT [ARGS]...",
)
def deepspeed(context: typer.Context) -> None:
    """Start a script as DeepSpeed's launcher does, with its flags."""
    from shoal.compat.launching import main

    main(context.args)


@app.command("ds-report", cls=UsageCommand)
def ds_report() -> None:
    """Print the versions, the accelerator, and which of DeepSpeed's operators are available."""
    from shoal.compat.about import main

    main()


def _train(*, overwrite: bool, text: list[str] | None, **options: Any) -> None:
    """Train a GPT on text, with validation, logs, a sample and a report."""
    from shoal.cli.start import start

    job = TrainJob(**options, text=tuple(text or ()) or None, command=shlex.join(["shoal", *sys.argv[1:]]))
    raise typer.Exit(start(job, overwrites=overwrite))


def _options_of(job: type[TrainJob]) -> Iterator[inspect.Parameter]:
    """The fields of a job as options of a command, and ``--overwrite``."""
    types = {**get_type_hints(job), "text": list[str] | None, "overwrite": bool}  # typer takes no tuple of any length
    annotated: Any = Annotated
    overwrite = typer.Option("--overwrite", help="Replace the run that --out contains.")
    options = [(each.name, each.default, each.metadata["option"]) for each in fields(job) if each.metadata]
    options.insert([name for name, *_ in options].index("out") + 1, ("overwrite", False, overwrite))
    for name, default, option in options:
        annotation = annotated[types[name], option]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_train.__signature__ = inspect.Signature([*_options_of(TrainJob)])  # type: ignore[attr-defined]  # which typer reads
app.command("train", cls=UsageCommand)(_train)


@app.command("quorum", cls=UsageCommand)
def quorum(
    replicas: Annotated[int, typer.Option("--replicas", "-n", min=1, help="Replicas that the run begins with.")],
    host: Annotated[str, typer.Option(help="Address that it listens at; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: one that is free.")] = 29600,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that the others wait for a replica before they leave it out.")
    ] = 300.0,
) -> None:
    """Say which replicas take part in each step of a run with fault_tolerance. Ctrl-C ends it."""
    from shoal.comm.environment import QUORUM_TOKEN, quorum_token
    from shoal.comm.quorum import QuorumServer
    from shoal.errors import UsageError

    token = quorum_token()
    if not token and not host.startswith(("127.", "localhost", "::1")):
        raise UsageError(
            f"--host {host} without {QUORUM_TOKEN}: everybody on the network could join the job or end it.",
            do=f"set {QUORUM_TOKEN} here and for each replica to one random text, as of `openssl rand -hex 16`.",
            code="quorum-token",
        )
    log = partial(print, flush=True)
    server = QuorumServer(port, host, num_replicas=replicas, timeout_seconds=timeout, token=token, log=log)
    print(f"quorum at {host}:{server.port}", flush=True)
    server.serve()


@app.command("report", cls=UsageCommand)
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, which need not be finished.")],
    other: Annotated[Path | None, typer.Argument(help="Folder of another run, to compare with.")] = None,
) -> None:
    """Write a run's report.html again from its logs; of two runs compare.html, in the folder of the first one."""
    from shoal.observe.compare import write_comparison
    from shoal.observe.report import write_report

    print(write_report(folder) if other is None else write_comparison(folder, other))


@app.command("watch", cls=UsageCommand)
def watch(
    folder: Annotated[Path, typer.Argument(help="Folder of a run of shoal train.")],
    once: Annotated[bool, typer.Option("--once", help="Print the values as they are now, and exit.")] = False,
) -> None:
    """Show a run's last values in the terminal, while it goes on. Ctrl-C ends it."""
    from shoal.cli.progress import watch as show

    show(folder, once=once)


@app.command("goodput", cls=UsageCommand)
def goodput(
    file: Annotated[Path, typer.Argument(help="The file of goodput.file, or the folder of a run of shoal train.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print where the time of a run went, over all its starts."""
    from shoal.observe.goodput import GOODPUT_FILE, read_goodput
    from shoal.text import counted, table

    found = read_goodput(file / GOODPUT_FILE if file.is_dir() else file)
    if json:
        print(
            json_text.dumps(
                {"goodput": found.share, "starts": found.num_starts, "steps": found.num_steps, **found.seconds}
            )
        )
        return
    print(
        f"goodput {found.share:.1%}: {counted(found.num_steps, 'step')} in {found.total:,.1f} s,"
        f" {counted(found.num_starts, 'start')}"
    )
    print(table(found.rows(), ["category", "seconds", "share", "what"]))


@app.command("doctor", cls=UsageCommand)
def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(help="Configuration file (JSON), or folder of a run. Without it, this machine is checked."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Total number of ranks, to compute the mesh and batch sizes.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Print the value of every key, including defaults.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema for editors, and exit.")] = False,
    machine: Annotated[
        str | None, typer.Option(help="Of a run: as of `shoal plan`, or a file of `shoal calibrate`. Default: its GPU.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a configuration: what each key does, and all problems. Without a file, check this machine.

    Of a run's folder: what to change, each with the figure that it is based on, and the gain by a dry run.

    The exit code is 1 where anything is wrong, 2 where the file is not there.
    """
    if schema:
        from shoal.config import json_schema

        print(json_text.dumps(json_schema(), indent=2, ensure_ascii=False))
        return
    if file is not None and file.is_dir():
        from shoal.planner.doctor import diagnose

        found = diagnose(file, machine)
        print(json_text.dumps(found.as_dict(), indent=2) if json else found)
        return
    if file is None:
        from shoal.cli.machine import check_machine

        is_fine = check_machine(as_json=json)
    else:
        from shoal.cli.config_table import check_file

        is_fine = check_file(file, world_size, shows_all=all_, as_json=json)
    if not is_fine:
        raise typer.Exit(1)


@app.command("calibrate", cls=UsageCommand)
def calibrate(
    out: Annotated[Path, typer.Argument(help="The YAML file to write.")] = Path("machine.yaml"),
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", min=1, help="Ranks that measure. Default: one per GPU, else 2.")
    ] = None,
) -> None:
    """Measure this machine for dry runs and plans on it: products, memory, copies, collectives, launches, the disk."""
    from shoal.planner.calibrate import calibrate as measure_machine

    print(f"wrote {measure_machine(out, ranks)}: use it as machine={str(out)!r}")


@app.command("schedule", cls=UsageCommand)
def pipeline_schedule(
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
    from shoal.pipeline.schedule import build_schedule
    from shoal.pipeline.simulate import lower, simulate, validate
    from shoal.pipeline.timeline import chrome_trace, grid
    from shoal.pipeline.timeline import svg as drawn

    chosen = build_schedule(name, ranks, micro, virtual_stages=virtual_stages)
    validate(chosen)
    timeline = simulate(chosen, forward, backward, backward / 2, backward / 2, send)
    print(grid(simulate(chosen, backward=1.0)))
    if actions:
        print("\n" + "\n".join(" ".join(map(str, order)) for order in lower(chosen)))
    print(f"\nbubble             {timeline.bubble:.1%} of the time to the last rank's end")
    print(f"bubble of a rank   {timeline.own_bubble:.1%}, at most, of the time from its own start to its own end")
    print(f"peak activations   {', '.join(map(str, timeline.peak_activations))} micro-batches by rank", end="")
    print(", one stage's each" if chosen.num_stages > chosen.num_ranks else "")
    for path, text in ((svg, drawn), (trace, chrome_trace)):
        if path is not None:
            path.write_text(text(timeline), encoding="utf-8")
            print(f"wrote {path}")
