"""How right a dry run is: published training runs, dry-run, against the step time and memory that was measured.

    python -m benchmarks.published_runs --published published.csv

Each row with a shape becomes a model, a configuration and a machine (``published_rows``). An engine runs once for a
row: what it queues is recorded as a tape (``published_tape``), in a folder, by a hash of the row's inputs, and is timed
again whenever a figure of a machine changes. A step of all blocks is extrapolated from models of two and three.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

import shoal
from benchmarks.published_models import PLAIN_TP_PLAN, TP_PLAN, build
from benchmarks.published_rows import Measured, Run, read
from benchmarks.published_tape import Tape, recording, replayed
from shoal.simulation.machines import GpuNode, machine_of

VERSION = 3  # of the tapes
_STEPS = 3


def engine_config(run: Run, num_micro: int) -> dict[str, object]:
    """Shoal's configuration of a run."""
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": num_micro,
        "zero_optimization": {"stage": run.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "parallel": {"tp": run.tp, "pp": run.stages_run, "tp_sequence_parallel": run.is_sequence_parallel},
        "pipeline": {"partition": "type:Block"},
    }
    if run.dtype != "float32":
        config["fp16" if run.dtype == "float16" else "bf16"] = {"enabled": True}
    if run.dtype.startswith("float8"):
        config["fp8"] = {"recipe": run.dtype.split()[1]}
    # What the published runs did not overlap, as Shoal does by default on accelerators.
    if run.tp > 1:
        config["tensor_parallel"] = {"tp_overlap_comm": False}
    if run.stage in (1, 2):
        config["zero_optimization"] = {"stage": run.stage, "overlap_param_gather": False}
    if run.tp > 1 and run.shape.kv_heads < run.shape.heads:
        config["parallel"]["tp_plan"] = TP_PLAN if run.shape.family == "llama" else PLAIN_TP_PLAN  # type: ignore[index]
    if run.recompute == "full":
        config["activation_checkpointing"] = {"modules": ["Block"]}
    elif run.recompute == "products":
        config["activation_checkpointing"] = {"modules": ["Block"], "policy": "matmul"}
    elif run.recompute == "attention":
        config["activation_checkpointing"] = {"modules": ["Scores"]}
    return config


def machine_for(run: Run) -> GpuNode:
    """Of a run's GPUs; V100s are those of a DGX-2."""
    machine = machine_of(run.machine).compiled() if run.is_fused else machine_of(run.machine)
    return replace(machine, gpus_per_node=16) if run.machine == "v100-32g" else machine


def tape_of(run: Run, layers: int) -> Tape:
    """Dry-run a run with so many layers on a pipeline stage, and record what it queues in its last step."""
    num_micro = run.micro_run
    shape = run.with_layers(layers * run.stages_run)

    def train(dry: shoal.simulation.dry_run.DryRun) -> None:
        tokens = torch.zeros(run.micro_batch, shape.sequence, dtype=torch.long)
        model = build(shape)
        if run.stages_run > 1:  # the last stage's norm begins once for a micro-batch
            model.norm.register_forward_pre_hook(lambda *_: tape.mark(dry))
        engine, *_ = shoal.initialize(model=model, config=engine_config(run, num_micro))
        for _ in range(_STEPS):
            with dry.step():
                if run.stages_run > 1:
                    engine.train_batch(iter([(tokens, tokens)] * num_micro))
                else:
                    for micro in range(num_micro):
                        engine.backward(engine(tokens, tokens))
                        if micro == 0:
                            tape.mark(dry)
                        engine.step()
        engine.destroy()

    ranks = run.tp * run.stages_run * run.dp
    with recording() as tape:
        tape.num_micro = num_micro
        if run.stages_run > 1:
            tape.finish(
                shoal.dry_run_pipeline(
                    train, ranks, run.stages_run, machine=machine_for(run), is_fused=run.is_fused
                ).stages
            )
        else:
            with shoal.dry_run(ranks, machine=machine_for(run), is_fused=run.is_fused) as dry:
                train(dry)
            tape.finish([dry])
    return tape


def tapes_of(run: Run, folder: Path) -> tuple[Tape, Tape]:
    """Of two and three layers; one and two in a pipeline."""
    key = hashlib.sha256(json.dumps([VERSION, asdict(run.inputs)], sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{key}.json"
    if not path.exists():
        first = 1 if run.stages_run > 1 else 2
        made = tape_of(run, first), tape_of(run, first + 1)
        path.write_text(json.dumps([tape.as_json() for tape in made]))
    few, more = map(Tape.from_json, json.loads(path.read_text()))
    return few, more


def predicted(run: Run, tapes: tuple[Tape, Tape], machine: GpuNode) -> float:
    """Seconds of a step of all layers, stages and micro-batches."""
    first = 1 if run.stages_run > 1 else 2
    micros, rest, hosts = zip(*(replayed(tape, machine) for tape in tapes), strict=True)

    def of_all(values: Sequence[float]) -> float:
        return values[0] + (values[1] - values[0]) * (run.shape.layers / run.pp - first)

    micro = max(of_all(micros), of_all(hosts))
    if run.pp == 1:
        return run.num_micro * micro + of_all(rest)
    return (run.num_micro + (run.pp - 1) / run.virtual_stages) * micro + of_all(rest)


def predicted_memory(run: Run, tapes: tuple[Tape, Tape]) -> float:
    """The most bytes that are allocated on the last rank, with all layers."""
    few, more = (tape.peaks[-1].allocated for tape in tapes)
    return float(few + (more - few) * (run.shape.layers / run.pp - (1 if run.stages_run > 1 else 2)))


def errors(rows: Sequence[tuple[Measured, float]]) -> tuple[float, float, float]:
    """Median absolute error and median of predicted / measured; Spearman's correlation within each study."""
    pairs = [(row.seconds or row.memory, value) for row, value in rows]
    ratios = [value / measured for measured, value in pairs]
    absolute = statistics.median(abs(ratio - 1) for ratio in ratios)
    return absolute, statistics.median(ratios), spearman(pairs)


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    if len(pairs) < 3:
        return float("nan")

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]

    return statistics.correlation(ranks([a for a, _ in pairs]), ranks([b for _, b in pairs]))


def report(rows: Sequence[tuple[Measured, float]]) -> str:
    """Errors by study."""
    lines = [f"{'study':34} {'rows':>4} {'median error':>12} {'pred / meas':>11} {'Spearman':>8}"]
    studies = list(dict.fromkeys(row.study for row, _ in rows))
    for study in [*studies, ""]:
        some = [each for each in rows if each[0].study == study or not study]
        absolute, ratio, correlation = errors(some)
        lines.append(f"{study or 'all':34} {len(some):4} {100 * absolute:10.1f} % {ratio:11.2f} {correlation:8.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", type=Path, default=Path("../shared/published.csv"))
    parser.add_argument("--tapes", type=Path, default=Path("published_tapes"))
    parser.add_argument("--rows", action="store_true", help="print each row")
    parser.add_argument("--part", default="0/1", help="of the rows: 0/2 the first of every two, 1/2 the others")
    parser.add_argument("--only", default="", help="studies whose name has this")
    options = parser.parse_args()
    logging.getLogger("shoal").setLevel(logging.WARNING)
    options.tapes.mkdir(parents=True, exist_ok=True)
    measured, dropped = read(options.published)
    results = []
    numbers: Counter[str] = Counter()
    places = {id(row): (numbers.update([row.study]) or numbers[row.study], row.study) for row in measured}
    ordered = sorted(measured, key=lambda row: places[id(row)])  # some of each study first
    number, of = map(int, options.part.split("/"))
    for row in ordered[number::of]:
        if options.only not in row.study:
            continue
        began = time.monotonic()
        try:
            tapes = tapes_of(row.run, options.tapes)
            value = predicted_memory(row.run, tapes) if row.memory else predicted(row.run, tapes, machine_for(row.run))
        except Exception as error:  # one row's error must not end the others
            print(f"FAILED {row.study} {row.name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            continue
        results.append((row, value))
        if options.rows or time.monotonic() - began > 2:
            measured_value = row.seconds or row.memory
            ratio = value / measured_value
            print(f"{row.study[:24]:24} {row.name:60} {measured_value:9.4g} {value:9.4g} {ratio:6.2f}", flush=True)
    for what in ("seconds", "memory"):
        if some := [each for each in results if getattr(each[0], what)]:
            print(f"\n{what}\n{report(some)}")
    print("\nstudies and rows that are left out:")
    for why, number in dropped.items():
        print(f"  {number:5} rows: {why}")


if __name__ == "__main__":
    main()
