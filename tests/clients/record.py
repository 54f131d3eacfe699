"""Record what DeepSpeed does with the clients' scripts.

``PYTHON -m tests.clients.record [--ranks N] [--apart] SCRIPT [CASE ...]`` with a Python that has the clients and
deepspeed 0.19.8 writes ``tests/fixtures/clients/SCRIPT.json``, case by case: those named now, beside those recorded
before.
With ``--apart`` each named case has processes of its own: Ulysses stays registered with Transformers, so parallel_cases
needs it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.clients.running import GOLDEN, ClientRun, run_script

PACKAGES = ("deepspeed", "torch", "accelerate", "transformers", "peft", "trl", "lightning", "ray")


def main(*arguments: str) -> None:
    ranks = 2
    if arguments[0] == "--ranks":
        ranks, arguments = int(arguments[1]), arguments[2:]
    is_apart = arguments[0] == "--apart"
    script, *cases = arguments[is_apart:]
    if is_apart:
        run = _joined([run_script(f"{script}.py", case, runner=(), ranks=ranks) for case in cases])
    elif script == "accelerate_plain":
        run = _launched(cases)
    else:
        run = run_script(f"{script}.py", *cases, runner=(), timeout=580, ranks=ranks)
    path = GOLDEN / f"{script}.json"
    held = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    held["versions"] = {package: found for package in PACKAGES if (found := _version(package))}
    held["data"] = "tests/clients/scripts/common.py: Sequences, seed 17, on CPU over Gloo"
    for name, result in run.results.items():
        result.pop("seconds", None)
        held["cases"][name] = {key: _rounded(value) for key, value in result.items() if key != "case"}
        print(name, result.get("error", "recorded"))
    GOLDEN.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")
    print(f"exit codes {run.codes}, {run.seconds:.0f} s")
    (GOLDEN.parent.parent.parent / "runs").mkdir(exist_ok=True)
    (GOLDEN.parent.parent.parent / "runs" / f"record-{script}.log").write_text(run.tail())


def _launched(cases: list[str]) -> ClientRun:
    """The cases of ``test_accelerate_launch``, each by ``accelerate launch``."""
    from tests.clients.test_accelerate_launch import ARGUMENTS, launch

    with tempfile.TemporaryDirectory() as folder:
        return _joined([launch(Path(folder), case, as_deepspeed=False) for case in cases or ARGUMENTS])


def _joined(runs: list[ClientRun]) -> ClientRun:
    results = {case: result for run in runs for case, result in run.results.items()}
    said = ["\n".join(run.said[0] for run in runs)]
    return ClientRun(results, said, [run.codes[0] for run in runs], sum(run.seconds for run in runs))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 7)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return value


if __name__ == "__main__":
    main(*sys.argv[1:])
