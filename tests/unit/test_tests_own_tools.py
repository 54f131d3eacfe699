"""The tests' own tools do what tests rely on."""

from __future__ import annotations

import ast
import itertools
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conftest import LONG_FILES
from tests.helpers.any_two import covering_rows
from tests.helpers.gloo_pool import GlooPool, GlooRankError
from tests.helpers.places import ROOT
from tests.helpers.stream_mutants import UNREACHED
from tests.helpers.stream_scenarios import LEFT_OUT, TEST_FILES


def add_ranks(rank: int, size: int, start: torch.Tensor) -> torch.Tensor:
    total = start + rank
    dist.all_reduce(total)
    return total


def process_of(rank: int, size: int) -> int:
    return os.getpid()


def fail_on_rank_one(rank: int, size: int) -> None:
    if rank == 1:
        raise ValueError("rank one stumbles")
    dist.barrier()


def sleep_long(rank: int, size: int) -> None:
    time.sleep(60)


@pytest.mark.gloo
def test_gloo_processes_are_reused_and_return_tensors_in_rank_order(gloo: Any) -> None:
    first = gloo(2, add_ranks, torch.tensor([10.0]))
    processes = gloo(2, process_of)
    second = gloo(2, add_ranks, torch.tensor([20.0]))
    assert gloo(2, process_of) == processes != [os.getpid()] * 2
    assert [value.item() for value in first] == [21.0, 21.0]
    assert [value.item() for value in second] == [41.0, 41.0]


@pytest.mark.gloo
def test_a_rank_that_raises_ends_the_pool_with_its_traceback() -> None:
    pool = GlooPool(2)
    with pytest.raises(GlooRankError, match="rank one stumbles"):
        pool.call(fail_on_rank_one)
    assert not pool.is_alive


@pytest.mark.gloo
def test_ranks_that_hang_are_ended_within_the_timeout() -> None:
    pool = GlooPool(2)
    pool.call(add_ranks, torch.zeros(1))  # the processes are up
    begin = time.monotonic()
    with pytest.raises(GlooRankError, match=r"no answer from ranks \[0, 1\]"):
        pool.call(sleep_long, timeout=0.5)
    assert time.monotonic() - begin < 10
    assert not pool.is_alive


def test_a_function_that_another_process_cannot_find_is_refused(gloo: Any) -> None:
    with pytest.raises(ValueError, match="cannot be found by name"):
        gloo(1, lambda rank, size: None)


def test_any_two_indices_of_different_places_are_together_in_one_of_few_rows() -> None:
    sizes = [3, 3, 3, 2, 3]
    rows = covering_rows(sizes)
    for (one, few), (other, many) in itertools.combinations(enumerate(sizes), 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(range(few), range(many)))
    assert len(rows) == len(set(rows)) == 12  # of 162


def test_the_files_that_run_first_are_there() -> None:
    assert [name for name in LONG_FILES if not (ROOT / name).is_file()] == []


def test_every_reason_is_of_a_site_that_there_is() -> None:
    for part in UNREACHED:
        file, _, text = part.partition(" ")
        assert text in (ROOT / file).read_text()


def test_every_test_that_is_left_out_is_in_a_file_that_runs() -> None:
    text = "".join((ROOT / file).read_text() for file in TEST_FILES)
    for name in LEFT_OUT:
        assert f"def {name.partition('[')[0]}(" in text


def test_what_tests_import_of_each_other_is_there() -> None:
    """Also where nothing imports them: at night, and with packages that this environment lacks."""
    missing = []
    for path in ROOT.glob("tests/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tests":
                base = ROOT.joinpath(*str(node.module).split("."))
                if not base.with_suffix(".py").is_file():  # a package
                    names = [alias.name for alias in node.names]
                    missing += [
                        f"{path.relative_to(ROOT)}: {node.module}.{name}"
                        for name in names
                        if not (base / f"{name}.py").is_file() and not (base / name / "__init__.py").is_file()
                    ]
    assert missing == []
