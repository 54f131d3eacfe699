"""The commands and their options. Each body imports what it needs, so that ``--help`` waits for nothing."""

from __future__ import annotations

import json as json_text
import shlex
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.as_deepspeed import as_deepspeed
from shoal.cli.checkpoint import app as checkpoint_app
from shoal.cli.convert import convert
from shoal.cli.estimate import estimate
from shoal.cli.usage import OrderedGroup, UsageCommand

app = typer.Typer(
    name="shoal",
    cls=OrderedGroup,
    help="Train PyTorch models that are too large or too slow for one device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(checkpoint_app, name="checkpoint")
app.command("estimate", cls=UsageCommand)(estimate)
app.command("convert", cls=UsageCommand)(convert)
app.command("as-deepspeed", cls=UsageCommand)(as_deepspeed)


PrecisionOption = StrEnum("PrecisionOption", "fp32 bf16 fp16")
ScheduleOption = StrEnum("ScheduleOption", "cosine linear constant")


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


_VERBOSE = typer.Option("--verbose", "-v", help="Also print the placement and memory tables (SHOAL_LOG_LEVEL=debug).")


@app.command("run", cls=UsageCommand, context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="A Python file, or with --module the name of a module.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="Number of ranks to start. Default: one per visible GPU, else 1."),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="Run SCRIPT as a module, like python -m.")] = False,
    as_deepspeed: Annotated[
        bool,
        typer.Option(
            "--as-deepspeed",
            help="`import deepspeed` imports Shoal, also in child processes. SCRIPT may be a launcher (accelerate).",
        ),
    ] = False,
    verbose: Annotated[bool, _VERBOSE] = False,
    stop_seconds: Annotated[
        int,
        typer.Option(min=0, help="Seconds from SIGTERM to SIGKILL when ranks are terminated, so that they can save."),
    ] = 5,
) -> None:
    """Start a script on several local ranks, one process each."""
    from shoal.cli.job import default_ranks
    from shoal.launch import LocalJob, run_local
    from shoal.launch.environment import LOG_LEVEL
    from shoal.launch.script import check_script, misplaced_ranks

    given = args or []
    if as_deepspeed:
        from shoal.cli.as_deepspeed import become_command, is_command, job_as_deepspeed

        if not module and is_command(script):
            become_command(script, given, ranks)
        job = job_as_deepspeed(script, given, is_module=module, ranks=ranks or default_ranks())
    else:
        job = LocalJob([sys.executable, *(["-m"] if module else []), script, *given], ranks or default_ranks())
    check_script(script, is_module=module)
    if not module and (advice := misplaced_ranks(script, given)):
        print(advice, file=sys.stderr)
    if verbose:
        job = replace(job, environment={**job.environment, LOG_LEVEL: "debug"})
    outcome = run_local(replace(job, stop_seconds=stop_seconds))
    if outcome.report:
        print(f"\n{outcome.report}", file=sys.stderr)
    raise typer.Exit(outcome.exit_code)


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


@app.command("train", cls=UsageCommand)
def train(
    model: Annotated[
        str | None, typer.Option(help="A shape by name: nano, tiny, mini, small-34m, 124m ... 175b.")
    ] = None,
    parameters: Annotated[str | None, typer.Option(help="A shape by its number of parameters, such as 10M.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Number of blocks.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Width of the model.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads per block.")] = None,
    vocab: Annotated[
        int | None, typer.Option(min=1, help="Vocabulary size, at least the tokenizer's. Default: the tokenizer's.")
    ] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence.")] = None,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Experts (feed-forward networks) in each block. Default: none.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Experts that each token uses. Default: 2.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="A file, folder or pattern to train on; may be given several times. Default: Python's docs."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="A tokenizers JSON file. Default: text is read as bytes.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", min=1, help="Local ranks. Default: one per visible GPU, else 1.")
    ] = None,
    stage: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage. Default: 3.")] = None,
    pp: Annotated[
        int | None, typer.Option(min=1, help="Pipeline-parallel ranks: each holds different layers. Default: 1.")
    ] = None,
    pipeline_schedule: Annotated[
        str | None, typer.Option(help="gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv, ..., or a file. Default: 1f1b.")
    ] = None,
    virtual_stages: Annotated[int | None, typer.Option(min=1, help="Pipeline stages of one rank. Default: 1.")] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel ranks: each holds a part of each layer. Default: 1.")
    ] = None,
    sp: Annotated[int | None, typer.Option(min=1, help="Sequence-parallel ranks (Ulysses). Default: 1.")] = None,
    cp: Annotated[int | None, typer.Option(min=1, help="Context-parallel ranks (ring attention). Default: 1.")] = None,
    ep: Annotated[
        int | None, typer.Option(min=1, help="Expert-parallel ranks: each holds different experts. Default: 1.")
    ] = None,
    precision: Annotated[PrecisionOption | None, typer.Option(help="Default: bf16 on a GPU, fp32 on CPU.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per rank and forward pass. Default: 8.")
    ] = None,
    accumulation: Annotated[int | None, typer.Option(min=1, help="Forward passes per step. Default: 1.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many steps.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Stop after this many minutes. Default: 3, without --steps.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Peak learning rate. Default: by the model's size.")
    ] = None,
    schedule: Annotated[
        ScheduleOption | None, typer.Option(help="Learning-rate schedule after a warm-up. Default: cosine.")
    ] = None,
    clip: Annotated[
        float | None, typer.Option(min=0, help="Largest gradient norm; 0: no clipping. Default: 1.0.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A DeepSpeed-style JSON file; options given here override it."),
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="PATH", help="Folder of the run. Default: runs/DATE-TIME.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that --out contains.")] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the weights, the order of data, and sampling. Default: 0.")
    ] = None,
    validate_every: Annotated[int | None, typer.Option(min=1, help="Steps between validations.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt of the sample that is generated at the end.")] = None,
    sample_tokens: Annotated[
        int | None, typer.Option(min=0, help="Number of tokens to generate at the end; 0: none. Default: 400.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature. Default: 0.8.")] = None,
    save_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between checkpoints; 0: no checkpoints. Default: one at the end.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Resume the run in this folder with its options; those given here replace them."),
    ] = None,
    verbose: Annotated[bool, _VERBOSE] = False,
) -> None:
    """Train a GPT on text, with validation, logs, a sample and a report."""
    options = {**locals()}  # by the names of ``TrainJob``
    from shoal.cli.job import TrainJob
    from shoal.cli.start import start

    del options["overwrite"]
    command = shlex.join(["shoal", *sys.argv[1:]])
    job = TrainJob(**{**options, "text": tuple(text or ())}, command=command)
    raise typer.Exit(start(job, overwrites=overwrite))


@app.command("report", cls=UsageCommand)
def report(folder: Annotated[Path, typer.Argument(help="Folder of a run, which need not be finished.")]) -> None:
    """Write a run's report.html again from its logs."""
    from shoal.observe.report import write_report

    print(write_report(folder))


@app.command("doctor", cls=UsageCommand)
def doctor(
    file: Annotated[
        Path | None, typer.Argument(help="Configuration file (JSON). Without it, this machine is checked.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Total number of ranks, to compute the mesh and batch sizes.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Print the value of every key, including defaults.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema for editors, and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a configuration: what each key does, and all problems. Without a file, check this machine.

    The exit code is 1 where anything is wrong, 2 where the file is not there.
    """
    if schema:
        from shoal.config import json_schema

        print(json_text.dumps(json_schema(), indent=2, ensure_ascii=False))
        return
    if file is None:
        from shoal.cli.machine import check_machine

        is_fine = check_machine(as_json=json)
    else:
        from shoal.cli.config_table import check_file

        is_fine = check_file(file, world_size, shows_all=all_, as_json=json)
    if not is_fine:
        raise typer.Exit(1)


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
