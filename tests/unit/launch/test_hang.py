"""Which rank the others wait for, and what a dump of stacks says."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore

import shoal
from shoal.comm.environment import heartbeat_place
from shoal.errors import UsageError
from shoal.hang import HangGuard, Stuck, causes_of, describe_hang, kept_dumps, main_stack, nccl_status
from shoal.heartbeat import Beat, Heartbeat, clear_heartbeats, open_heartbeat, read_heartbeats, read_starts
from shoal.launch.local import _init_seconds
from shoal.process import boot, started

BEAT = Beat(0, 0, 1, 1, "step", 0.0, 60.0, 7, 100, "all_gather 'layers.3' on axis 'dp'", thread=1)
PACKAGE = Path(shoal.__file__).parent
WAITING = (f'  File "{PACKAGE}/comm/gloo.py", line 3 in wait', '  File "/home/me/train.py", line 9 in main')
COMPUTING = ('  File "/home/me/model.py", line 5 in forward', '  File "/home/me/train.py", line 9 in main')


def ranks(*stuck: Stuck) -> list[Stuck]:
    return [replace(each, beat=replace(each.beat, rank=rank)) for rank, each in enumerate(stuck)]


@pytest.mark.parametrize(
    ("stuck", "causes"),
    [
        ([Stuck(BEAT, WAITING), Stuck(BEAT, COMPUTING), Stuck(BEAT, (), is_stopped=True)], [2]),
        ([Stuck(BEAT, WAITING), Stuck(BEAT, COMPUTING), Stuck(BEAT, WAITING)], [1]),
        ([Stuck(BEAT, WAITING), Stuck(replace(BEAT, num_issued=99), WAITING)], [1]),
        ([Stuck(BEAT, COMPUTING), Stuck(replace(BEAT, num_issued=99), COMPUTING)], [1]),
        ([Stuck(BEAT, WAITING), Stuck(BEAT, WAITING)], []),
        ([Stuck(BEAT, COMPUTING)], [0]),
    ],
)
def test_the_ranks_that_the_others_wait_for(stuck: list[Stuck], causes: list[int]) -> None:
    assert [each.beat.rank for each in causes_of(ranks(*stuck))] == causes


def test_a_report_names_a_late_section_the_ranks_and_their_last_collectives() -> None:
    data = replace(BEAT, section="data", seconds=0.0)
    text = describe_hang(ranks(Stuck(BEAT, WAITING, is_late=True), Stuck(data, COMPUTING)), "/tmp/kept.txt")
    head, second, third, *_ = text.splitlines()
    assert "step 7: rank 1 hangs; section 'step' of rank 0 took longer than its 60 s (timeouts.step)" in head
    last = "collective 100: all_gather 'layers.3' on axis 'dp'"
    assert second == f"  rank 1: runs /home/me/model.py:5, in forward; {last}"
    assert third.startswith("  rank 0: waits in a collective, called at /home/me/train.py:9, in main; ")
    assert "/tmp/kept.txt" in text


def test_a_report_on_many_ranks_fits_a_screen() -> None:
    text = describe_hang(ranks(*[Stuck(BEAT, WAITING * 20, is_late=True)] * 64), "/tmp/kept.txt")
    assert "all ranks wait" in text and "and 48 more ranks" in text
    assert len(text.splitlines()) < 40


@pytest.mark.parametrize(
    ("main", "expected"),
    [("train.py", "train.py"), ("torch/autograd/graph.py", "shoal/running/hooks.py")],
    ids=["main thread", "thread of autograd"],
)
def test_the_stack_is_that_of_the_main_thread_or_of_the_one_that_runs_backward(main: str, expected: str) -> None:
    dump = f"""Fatal Python error: Aborted

Thread 0x00007f01 [pt_autograd_0] (most recent call first):
  File "/lib/shoal/running/hooks.py", line 3 in on_gradient

Current thread 0x00007f02 (most recent call first):
  File "/lib/{main}", line 8 in _engine_run_backward
  File "/lib/torch/other.py", line 9 in main

Extension modules: torch._C (total: 1)
""".replace("_engine_run_backward", "_engine_run_backward" if "graph" in main else "run")
    assert main_stack(dump)[0].startswith(f'  File "/lib/{expected}"')
    assert main_stack(dump, 0x7F01)[0].endswith("line 3 in on_gradient")  # where that thread runs the program


def test_a_heartbeat_is_read_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HEARTBEATS", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "9")
    place = heartbeat_place()
    assert place is not None
    beat = open_heartbeat(place)
    beat.enter("step", 60.0, 5)
    beat.issued(12, "dp", "all_gather", "layers.3")
    (read,) = read_heartbeats(tmp_path)
    assert (read.local_rank, read.rank, read.pid) == (1, 9, os.getpid())
    assert (read.section, read.seconds, read.step) == ("step", 60.0, 5)
    assert (read.num_issued, read.last_issued) == (12, "all_gather 'layers.3' on axis 'dp'")
    assert replace(read, began=read.began - 61.0).is_late and not read.is_late
    beat.enter("checkpoint", None, 6)
    (read,) = read_heartbeats(tmp_path)
    assert (read.section, read.seconds, read.step, read.is_late) == ("checkpoint", 0.0, 6, False)
    assert not open_heartbeat(place).is_read  # a process that the rank has started
    clear_heartbeats(tmp_path)
    assert read_heartbeats(tmp_path) == []


def test_a_rank_is_late_that_does_not_come_to_initialize_unless_its_script_never_calls_it(tmp_path: Path) -> None:
    trains, reads = tmp_path / "train.py", tmp_path / "read.py"
    trains.write_text("engine, *_ = deepspeed.initialize(model=model)")
    reads.write_text("print(shoal.__version__)")
    assert _init_seconds(["python", str(trains), str(reads)]) == 3600
    assert _init_seconds(["python", str(reads), "--like", str(trains)]) == 0
    assert _init_seconds(["python", "-m", "shoal.cli.training", "job.json"]) == 3600
    pid = os.getpid()
    (tmp_path / "start-1").write_text(f"9 {pid} {started(pid)} {time.monotonic() - 5} 4.0")
    (tmp_path / "start-2").write_text(f"10 {pid} {started(pid)} {time.monotonic() - 5} 0.0")
    (tmp_path / "start-3").write_text(f"11 {pid} 1 {time.monotonic() - 5} 4.0")  # it has ended
    (tmp_path / "start-4").write_text("")  # it begins to write
    late, other = read_starts(tmp_path)
    assert (late.local_rank, late.rank, late.section, late.is_late, late.is_before_init) == (1, 9, "init", True, True)
    assert (other.rank, other.is_late) == (10, False)
    (tmp_path / "1").touch()  # its heartbeat
    assert [beat.rank for beat in read_starts(tmp_path)] == [10]


def test_the_time_to_initialize_is_set_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_INIT_SECONDS", "90")
    assert _init_seconds(["python", "read.py"]) == 90
    monkeypatch.setenv("SHOAL_INIT_SECONDS", "1h")
    with pytest.raises(UsageError, match="SHOAL_INIT_SECONDS='1h' is not a number of seconds"):
        _init_seconds(["python", "read.py"])


def test_what_nccl_counts_is_in_the_file_of_a_hang() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> bytes:
            connection, _ = server.accept()
            with connection:
                asked = b""
                while not asked.endswith(b"verbose status\n"):
                    asked += connection.recv(100)
                connection.sendall(b"OK\n")
                connection.sendall(b"Communicators... rank 3 has launched 41 collectives, the others 42\n")
                return asked

        with ThreadPoolExecutor() as threads:
            asked = threads.submit(answer)
            nccl = nccl_status(port)
        assert asked.result() == b"timeout 1\nverbose status\n"
    kept = Path(kept_dumps({0: "stack of 0", 1: "stack of 1"}, nccl))
    text = kept.read_text()
    kept.unlink()
    assert text.startswith("rank 0\nstack of 0\nrank 1\nstack of 1\nNCCL\nOK\nCommunicators... rank 3 has launched 41")
    assert nccl_status(port) == ""  # nothing listens any more


def test_without_a_launcher_nothing_is_written() -> None:
    beat = Heartbeat()
    beat.enter("step", 1.0)
    beat.issued(1, "dp", "all_gather", "root")
    assert not beat.is_read


@pytest.mark.parametrize("is_continued", [False, True])
def test_a_process_that_others_have_continued_leaves_the_silent_ones_to_them(is_continued: bool) -> None:
    """They end it, maybe before it has ended the silent ones."""
    store = HashStore()
    guard = HangGuard.__new__(HangGuard)
    guard._rank, guard._size, guard._silent = 0, 3, []
    if is_continued:
        store.set("seen/0", "")
    guard._look_at_neighbours(store)
    assert store.check([f"neighbours/{boot()}"]) != is_continued
