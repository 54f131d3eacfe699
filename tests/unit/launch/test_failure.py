"""The report on failed ranks: which error, of which ranks, and with which exit code."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from shoal.launch.failure import EndedRank, describe, read_error

OWN = """[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "{script}", line 9, in main
[rank{rank}]:     engine.load_checkpoint("x")
[rank{rank}]:     ^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank{rank}]:   File "{shoal}/engine/engine.py", line 1, in load_checkpoint
[rank{rank}]:     raise CheckpointError(
[rank{rank}]: shoal.errors.CheckpointError: [checkpoint-missing] no complete checkpoint in x.
[rank{rank}]:   where: found by rank {rank}
[rank{rank}]:   do: look.
[rank{rank}]:[W1122 23:00:00.1 ProcessGroup.cpp:1] Warning: destroy it
"""
CRASH = """Traceback (most recent call last):
  File "/x/train.py", line 3, in <module>
    1 / 0
ZeroDivisionError: division by zero
"""
PEER = """Traceback (most recent call last):
  File "/x/train.py", line 5, in <module>
    engine.step()
shoal.errors.RankFailedError: [rank-failed] rank 0 failed, so this rank stops too. Its traceback:
Traceback (most recent call last):
  File "/x/train.py", line 3, in <module>
    1 / 0
ZeroDivisionError: division by zero
  do: rank 0 failed first; fix the error shown for rank 0.
"""


def ended(folder: Path, rank: int, text: str, code: int = 1, shown: str = "lines") -> EndedRank:
    path = folder / f"{rank}.log"
    path.write_text(text)
    os.utime(path, (rank, rank))
    return EndedRank(rank, rank, code, path, shown)  # type: ignore[arg-type]


def own(folder: Path, rank: int) -> str:
    import shoal

    return OWN.format(rank=rank, script=folder / "train.py", shoal=Path(str(shoal.__file__)).parent)


def test_an_error_of_shoals_is_told_once_for_all_ranks_with_the_users_line(tmp_path: Path) -> None:
    code, report = describe([ended(tmp_path, rank, own(tmp_path, rank)) for rank in range(3)])
    assert code == 1
    assert report.splitlines() == [
        "shoal: ranks 0 to 2 failed with the same error and exit code 1.",
        "[checkpoint-missing] no complete checkpoint in x.",
        "  where: found by rank 0",
        "  do: look.",
        f'  at: {tmp_path}/train.py:9, in main: engine.load_checkpoint("x")',
        "  SHOAL_TRACEBACK=1 in the environment shows the traceback.",
    ]


def test_on_request_its_traceback_is_whole(tmp_path: Path) -> None:
    _, report = describe([ended(tmp_path, 0, own(tmp_path, 0))], whole=True)
    assert report.splitlines()[1] == "Traceback (most recent call last):"
    assert "    raise CheckpointError(" in report.splitlines()


def test_another_error_has_its_traceback_and_that_of_a_rank_that_lost_it_is_left_out(tmp_path: Path) -> None:
    code, report = describe([ended(tmp_path, 1, PEER), ended(tmp_path, 0, CRASH, code=-15)])
    assert code == 1  # not that of the launcher's signal
    code, _ = describe([ended(tmp_path, 1, CRASH, code=3), ended(tmp_path, 0, CRASH, code=-15)])
    assert code == 3
    assert report == "shoal: rank 0 failed first: it ended with exit code 1.\n" + CRASH.rstrip()


def test_where_a_lost_rank_is_on_another_machine_its_error_is_told_without_frames(tmp_path: Path) -> None:
    _, report = describe([ended(tmp_path, 1, PEER)])
    assert "ZeroDivisionError: division by zero" in report.splitlines()
    assert "1 / 0" not in report
    assert "  at: /x/train.py:5, in <module>: engine.step()" in report.splitlines()


def test_nothing_is_repeated_that_the_terminal_has_already(tmp_path: Path) -> None:
    _, report = describe([ended(tmp_path, 0, CRASH, shown="lines and traceback")])
    assert "Traceback" not in report
    assert "ZeroDivisionError: division by zero" in report
    _, report = describe([ended(tmp_path, 0, "usage: train.py [-h]\n", code=2)])
    assert report == "shoal: rank 0 failed first: it ended with exit code 2."
    _, report = describe([ended(tmp_path, 1, "usage: train.py [-h]\n", code=2, shown="nothing")])
    assert report.splitlines()[1:] == ["usage: train.py [-h]"]


def test_a_long_traceback_fits_a_screen_and_is_whole_on_request(tmp_path: Path) -> None:
    frames = [f'  File "/x/layer{at}.py", line {at}, in forward\n    return inner(x)\n' for at in range(40)]
    crash = "Traceback (most recent call last):\n" + "".join(frames) + "ValueError: bad\n"
    _, report = describe([ended(tmp_path, 0, crash)])
    lines = report.splitlines()
    assert len(lines) <= 24
    assert [line for line in lines if "File" in line] == [
        '  File "/x/layer0.py", line 0, in forward',
        *(f'  File "/x/layer{at}.py", line {at}, in forward' for at in range(32, 40)),
    ]
    assert lines[4] == "  ... 31 frames; SHOAL_TRACEBACK=1 in the environment shows them ..."
    assert lines[-1] == "ValueError: bad"
    _, report = describe([ended(tmp_path, 0, crash)], whole=True)
    assert report.count("File") == 40


def test_a_killed_rank_says_so(tmp_path: Path) -> None:
    code, report = describe([EndedRank(1, 1, -9, None, "lines"), ended(tmp_path, 0, "", code=-15)])
    assert code == 128 + 9
    assert report == "shoal: rank 1 failed first: it was ended by SIGKILL.\nIt wrote nothing to stderr."


def test_an_error_of_the_hardware_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    broken = CRASH.replace("ZeroDivisionError: division by zero", "RuntimeError: CUDA error: uncorrectable ECC error")
    code, report = describe([ended(tmp_path, 1, PEER), ended(tmp_path, 0, broken, code=-15)])
    assert code == 74
    assert report.splitlines()[-1] == f"shoal: a device of {socket.gethostname()} has failed; exit code 74."
    code, _ = describe([ended(tmp_path, 1, PEER.replace("division by zero", "uncorrectable ECC error"))])
    assert code == 1  # on another node


def test_the_cause_of_an_exception_belongs_to_the_traceback() -> None:
    link = "\nThe above exception was the direct cause of the following exception:\n\n"
    error = read_error("noise\n" + CRASH + link + CRASH.replace("ZeroDivisionError", "ValueError"))
    assert error.error == ("ValueError: division by zero",)
    assert error.traceback[0].startswith("Traceback")
    assert any(line.startswith("ZeroDivisionError") for line in error.traceback)


def test_cpp_frames_are_no_part_of_a_report(tmp_path: Path) -> None:
    frames = "Exception raised from recvBytes at /torch/Utils.hpp:7 (most recent call first):\nframe #0: f() + 0x9\n"
    code, report = describe([ended(tmp_path, 0, f"[W1128 04:42:30.3 TCPStore.cpp:1] closed\n{frames}{CRASH}")])
    assert (code, report.splitlines()[1:]) == (1, CRASH.splitlines())


def test_ranks_that_have_waited_for_one_that_had_to_be_killed_name_it(tmp_path: Path) -> None:
    waited = "Traceback (most recent call last):\nshoal.errors.CommError: [init-timeout] rank 1 waited for rank 0\n"
    _, report = describe([ended(tmp_path, 0, "", -9), ended(tmp_path, 1, waited)])
    assert report.splitlines()[:2] == [
        "shoal: rank 1 failed first: it ended with exit code 1.",
        "[init-timeout] rank 1 waited for rank 0",
    ]
