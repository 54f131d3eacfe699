"""Compare an old commit of Shoal with the working tree: step time, memory, checkpoint time, and bits of the results.

    python -m benchmarks.compare_commits 243badd
    python -m benchmarks.compare_commits 243badd --cases fp32-0 fp32-3-host --rounds 9 --out runs/compare.json

The old ``shoal`` package is extracted with ``git archive`` into a temporary folder. Each case trains the same model
with both versions, each version in processes of its own, in turn (old new, new old, old new, ...), so that both see the
same load of the machine. The benchmark code is the working tree's for both.

    column          meaning
    step            median over the rounds of (median step time, new) / (median step time, old)
    spread          least and greatest of these ratios: a change within the spread is noise
    peak, set-up    peak resident memory of the largest rank, in training steps and up to the first step: new / old
    save, load      median seconds of ``save_checkpoint`` and ``load_checkpoint``: new / old
    losses          do all losses of all ranks have the same bits? Steps before and after the checkpoint is loaded count
    parameters      do all parameters have the same bits at the end?

The exit status is 1 if losses or parameters of a case differ, or if one version failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arena import ROOT, ContenderError, Team, machine, reason, table
from benchmarks.contenders import Task

HOST = {"offload_optimizer": {"device": "cpu"}}
PARAMETERS_ON_HOST = HOST | {"offload_param": {"device": "cpu"}}
DISK = {"offload_optimizer": {"device": "nvme"}}

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {  # precision, stage, more of "zero_optimization"
    **{f"{precision}-{stage}": (precision, stage, {}) for precision in ("fp32", "bf16") for stage in range(4)},
    **{f"fp32-{stage}-host": ("fp32", stage, HOST) for stage in (1, 2, 3)},
    "fp32-3-host-parameters": ("fp32", 3, PARAMETERS_ON_HOST),
    "fp32-3-disk": ("fp32", 3, DISK),
    "bf16-2-host": ("bf16", 2, HOST),
}
VERSIONS = ("old", "new")


@dataclass
class Measured:
    """What one version showed in one case. Times are those of the slowest rank."""

    rounds: list[float] = field(default_factory=list)  # median step seconds of each round
    saves: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    losses: list[list[str]] = field(default_factory=list)  # [rank][step], hexadecimal
    parameters: dict[str, str] = field(default_factory=dict)  # checksums by name
    peak_bytes: int = 0
    setup_peak_bytes: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the old version, as git names it")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps in a round, after one that is not counted")
    parser.add_argument("--checkpoints", type=int, default=3, help="checkpoints saved and loaded; 0: none")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=1, help="sequences a rank, of 256 tokens")
    parser.add_argument("--clipping", type=float, default=1.0, help="the config's gradient_clipping")
    parser.add_argument("--accumulation", type=int, default=1, help="the config's gradient_accumulation_steps")
    parser.add_argument("--folder", type=Path, help="for checkpoints and disk tiers; None: a temporary one")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    arguments = parser.parse_args()
    task = Task(
        sequences=arguments.sequences,
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_heads=max(1, arguments.hidden // 64),
        more={"gradient_clipping": arguments.clipping, "gradient_accumulation_steps": arguments.accumulation},
    )
    report: dict[str, Any] = {"machine": machine(), "commit": arguments.commit, "cases": {}}
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    with tempfile.TemporaryDirectory(prefix="shoal-compare-", dir=arguments.folder) as made:
        roots = {"old": extract(arguments.commit, Path(made) / "old"), "new": ROOT}
        for name in arguments.cases:
            folder = Path(made) / name
            row = compare(
                name, task, roots, folder, arguments.ranks, arguments.rounds, arguments.steps, arguments.checkpoints
            )
            report["cases"][name] = row
            print(row["error"] if "error" in row else show({name: row}), flush=True)
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{arguments.commit} (old) and the working tree (new)\n{show(report['cases'])}")
    sys.exit(any(row["differences"] or "error" in row for row in report["cases"].values()))


def extract(commit: str, folder: Path, repository: Path = ROOT) -> Path:
    """Write the package ``shoal`` of a commit below ``folder``. Returns: the folder.

    Raises: SystemExit: git does not know the commit.
    """
    folder.mkdir(parents=True)
    command = ["git", "-C", str(repository), "archive", commit, "shoal"]
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode:
        raise SystemExit(f"{' '.join(command)}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def compare(
    name: str,
    task: Task,
    roots: Mapping[str, Path],
    folder: Path,
    ranks: int,
    rounds: int,
    steps: int,
    checkpoints: int,
) -> dict[str, Any]:
    """Measure one case with both versions. Returns: its row, see the module's table."""
    precision, stage, zero = CASES[name]
    found = {version: Measured() for version in VERSIONS}
    teams: dict[str, Team] = {}
    try:
        for version in VERSIONS:
            disk = folder / version / "disk"
            disk.mkdir(parents=True)
            own = replace(task, precision=precision, zero=_with_folder(zero, disk))
            teams[version] = Team(f"shoal-{stage}", own, ranks, root=roots[version])
            answers = teams[version].wait_until_ready()
            used = {answer["shoal"] for answer in answers}
            if used != {str(roots[version])}:
                raise ContenderError(f"the {version} version imports shoal from {sorted(used)}, not {roots[version]}")
            found[version].setup_peak_bytes = max(answer["setup_peak_bytes"] for answer in answers)
            found[version].losses = [[float(answer["loss"]).hex()] for answer in answers]
        for number in range(rounds):
            for version in _in_turn(number):
                _steps(teams[version], found[version], steps)
        for number in range(checkpoints):
            for version in _in_turn(number):
                place = str(folder / version / "checkpoints")
                for request, times in (("save", found[version].saves), ("load", found[version].loads)):
                    answers = teams[version].ask(**{request: place, "tag": f"t{number}"})
                    times.append(max(answer["seconds"] for answer in answers))
        for version in VERSIONS:
            if checkpoints:
                _steps(teams[version], found[version], 1, is_timed=False)
            found[version].parameters = teams[version].ask(report="parameters")[0]["parameters"]
    except ContenderError as error:
        return {"error": str(error), "differences": []}
    finally:
        for team in teams.values():
            team.close()
    return summary(found["old"], found["new"])


def _in_turn(number: int) -> Sequence[str]:
    return VERSIONS if number % 2 == 0 else VERSIONS[::-1]


def _with_folder(zero: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The offload sections, with a folder of the version's own where state lies on a disk."""
    return {
        key: section | {"nvme_path": str(folder)} if section["device"] == "nvme" else section
        for key, section in zero.items()
    }


def _steps(team: Team, measured: Measured, steps: int, *, is_timed: bool = True) -> None:
    answers, _ = team.run(steps)
    slowest = [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]
    for losses, answer in zip(measured.losses, answers, strict=True):
        losses.extend(answer["losses"])
    if is_timed:
        measured.rounds.append(median(slowest))
        measured.peak_bytes = max(measured.peak_bytes, *(answer["peak_bytes"] for answer in answers))


def summary(old: Measured, new: Measured) -> dict[str, Any]:
    """The ratios of one case, new over old, and what differs.

    >>> row = summary(Measured([1.0, 2.0], losses=[["0x1"]]), Measured([1.1, 2.0], losses=[["0x2"]]))
    >>> row["step"], row["differences"]
    (1.05, ['loss of rank 0 in step 1: 0x1, now 0x2'])
    """
    ratios = [ours / theirs for theirs, ours in zip(old.rounds, new.rounds, strict=True)]
    row: dict[str, Any] = {
        "old_ms": round(1e3 * median(old.rounds), 2),
        "new_ms": round(1e3 * median(new.rounds), 2),
        "step": round(median(ratios), 4),
        "spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "peak": _ratio(old.peak_bytes, new.peak_bytes),
        "peak_mib": [round(old.peak_bytes / 2**20, 1), round(new.peak_bytes / 2**20, 1)],
        "setup": _ratio(old.setup_peak_bytes, new.setup_peak_bytes),
        "setup_mib": [round(old.setup_peak_bytes / 2**20, 1), round(new.setup_peak_bytes / 2**20, 1)],
    }
    for key, theirs, ours in (("save", old.saves, new.saves), ("load", old.loads, new.loads)):
        row[key] = _ratio(median(theirs), median(ours)) if theirs and ours else None
        row[f"{key}_seconds"] = [[round(value, 4) for value in values] for values in (theirs, ours)]
    row["differences"] = _differences(old, new)
    return row


def _ratio(old: float, new: float) -> float | None:
    return round(new / old, 4) if old else None


def _differences(old: Measured, new: Measured) -> list[str]:
    """The first loss that differs on each rank, and every parameter that differs."""
    found = []
    for rank, (theirs, ours) in enumerate(zip(old.losses, new.losses, strict=True)):
        pairs = enumerate(zip(theirs, ours, strict=True), 1)
        step = next((number for number, (one, other) in pairs if one != other), None)
        if step is not None:
            found.append(f"loss of rank {rank} in step {step}: {theirs[step - 1]}, now {ours[step - 1]}")
    for name in sorted(old.parameters.keys() | new.parameters.keys()):
        if old.parameters.get(name) != new.parameters.get(name):
            found.append(f"parameter {name}")
    return found


def show(rows: Mapping[str, dict[str, Any]]) -> str:
    head = ["case", "old ms", "new ms", "step", "spread", "peak", "set-up", "save", "load", "losses", "parameters"]
    lines, notes = [head], ""
    for name, row in rows.items():
        if "error" in row:
            lines.append([name, "failed", *[""] * (len(head) - 2)])
            notes += f"\n{name} failed: {reason(row['error'])}"
            continue
        kinds = {difference.split()[0] for difference in row["differences"]}
        low, high = row["spread"]
        cells = [f"{row['old_ms']:.1f}", f"{row['new_ms']:.1f}", f"{row['step']:.3f}", f"{low:.2f} to {high:.2f}"]
        cells += ["-" if row[key] is None else f"{row[key]:.3f}" for key in ("peak", "setup", "save", "load")]
        cells += ["differ" if kind in kinds else "equal" for kind in ("loss", "parameter")]
        lines.append([name, *cells])
        notes += "".join(f"\n{name}: {difference}" for difference in row["differences"][:4])
    return table(lines) + notes


if __name__ == "__main__":
    main()
