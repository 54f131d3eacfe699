"""Runs the tests of files, their ranks that are threads under the check of streams, and prints what it reports.

    python -m tests.helpers.stream_files [--few] tests/ranks/running/test_loops.py ...

Collectives run through ``shoal.comm.nccl``. A test that fails where the device is not the CPU (it counts on the host's
own order, or patches what the simulation takes the place of) is named; what was reported until then counts.
The status is 1 if anything is reported, and ``NO_THREADS`` if no test has ranks that are threads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.helpers.simulated_nccl import nccl_in_simulation
from tests.helpers.stream_scenarios import TestRuns

NO_THREADS = 5  # as pytest, where no test was collected
# Each sends to a peer outside of the batch in which it receives, as ranks that are threads may: NCCL would hang.
OF_THREADS = (
    "test_thread_ranks_have_groups_and_meshes_of_torch",
    "test_sends_and_all_to_all_among_threads",
    "test_sends_and_receives_are_recorded_with_the_bytes_received",
)


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--few", action="store_true", help="of each test only the first and the last parameters")
    parser.add_argument("files", nargs="+")
    options = parser.parse_args(args)
    runs = TestRuns(has_all_parameters=not options.few, leave_out=OF_THREADS)
    with nccl_in_simulation():
        runs.run(options.files)
    reported: dict[str, str] = {}  # by the text of a finding, the first test that has it
    for name, checks in runs.of_test.items():
        if not runs.passed[name]:
            print(f"fails on an accelerator: {name}: {runs.errors[name].splitlines()[0]}")
        for check in checks:
            for finding in check.findings:
                reported.setdefault(str(finding), name)
    for text, name in reported.items():
        print(f"{name}\n{text}\n")
    num_operations = sum(check.num_operations for checks in runs.of_test.values() for check in checks)
    print(f"{len(runs.of_test)} tests, {num_operations} operations, {len(reported)} reports")
    return int(bool(reported)) if runs.of_test else NO_THREADS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
