"""Record what DeepSpeed does with the clients' scripts.

``PYTHON -m tests.clients.record SCRIPT [CASE ...]`` with a Python that has the clients and deepspeed 0.19.8; writes
``tests/fixtures/clients/SCRIPT.json``, case by case: those named now, beside those recorded before.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version

from tests.clients.running import GOLDEN, run_script

PACKAGES = ("deepspeed", "torch", "accelerate", "transformers", "peft", "trl", "lightning", "ray")


def main(script: str, *cases: str) -> None:
    run = run_script(f"{script}.py", *cases, lent=(), timeout=580)
    path = GOLDEN / f"{script}.json"
    held = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    held["versions"] = {package: found for package in PACKAGES if (found := _version(package))}
    held["data"] = "tests/clients/scripts/common.py: Sequences, seed 17, 2 ranks on CPU over Gloo"
    for name, result in run.results.items():
        result.pop("seconds", None)
        held["cases"][name] = {key: _rounded(value) for key, value in result.items() if key != "case"}
        print(name, result.get("error", "recorded"))
    GOLDEN.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")
    print(f"exit codes {run.codes}, {run.seconds:.0f} s")
    (GOLDEN.parent.parent.parent / "runs").mkdir(exist_ok=True)
    (GOLDEN.parent.parent.parent / "runs" / f"record-{script}.log").write_text(run.tail())


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
