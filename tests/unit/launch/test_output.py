"""What the launcher writes of the ranks' output: whole lines, progress bars, and tracebacks that it keeps."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.launch.output import LastLine, RankOutput, StreamTail, Terminal

MakeTail = Callable[..., StreamTail]


class Screen(io.StringIO):
    """A stream that says whether it is a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)


@pytest.fixture
def pipe() -> Screen:
    return Screen(is_terminal=False)


@pytest.fixture
def tail() -> Iterator[MakeTail]:
    """Makes tails of files, which are closed in the end."""
    made: list[StreamTail] = []

    def make(path: Path, terminal: Terminal, prefix: str = "[rank 0] ", *, keeps: bool = False) -> StreamTail:
        made.append(StreamTail(path, terminal, prefix, keeps_tracebacks=keeps))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_a_line_that_comes_in_parts_is_written_whole(tmp_path: Path, pipe: Screen, tail: MakeTail) -> None:
    file = tmp_path / "out"
    reader = tail(file, Terminal(pipe))
    reader.read(0.0)  # the rank has not started
    append(file, "loss ")
    reader.read(0.1)
    append(file, "0.25\nlast")
    reader.read(0.2)
    assert pipe.getvalue() == "[rank 0] loss 0.25\n"
    reader.end()
    assert pipe.getvalue() == "[rank 0] loss 0.25\n[rank 0] last\n"


def test_in_a_pipe_a_progress_bar_is_a_whole_line_now_and_then_and_at_its_end(
    tmp_path: Path, pipe: Screen, tail: MakeTail
) -> None:
    file = tmp_path / "out"
    reader = tail(file, Terminal(pipe))
    for percent in range(0, 100, 10):
        append(file, f"\r{percent}%|{'#' * percent}|")
        reader.read(percent / 10)
    assert pipe.getvalue() == "[rank 0] 0%||\n"
    append(file, "\r95%|bar|")
    reader.read(11.0)
    append(file, "\r100%|bar|\ndone\r\n")
    reader.read(11.1)
    assert pipe.getvalue() == "[rank 0] 0%||\n[rank 0] 95%|bar|\n[rank 0] 100%|bar|\n[rank 0] done\n"


def test_on_a_terminal_one_bar_is_redrawn_and_lines_are_written_above_it(tmp_path: Path, tail: MakeTail) -> None:
    screen = Screen(is_terminal=True)
    terminal = Terminal(screen)
    first, second = (tail(tmp_path / name, terminal, f"[{name}] ") for name in "ab")
    append(tmp_path / "a", "\r10%")
    append(tmp_path / "b", "\r11%")
    first.read(0.0)
    second.read(0.0)
    append(tmp_path / "a", "\r20%")
    first.read(0.1)
    append(tmp_path / "b", "\r12%\n")
    second.read(0.2)
    assert screen.getvalue() == "\r\x1b[K[a] 10%\r\x1b[K[a] 20%\r\x1b[K[b] 12%\n"


def test_a_line_on_stdout_clears_a_bar_that_stderr_has_drawn(tmp_path: Path) -> None:
    screen = Screen(is_terminal=True)
    last_line = LastLine()
    Terminal(screen, last_line).bar("50%", "a rank")
    Terminal(screen, last_line).line("a line")
    Terminal(screen, last_line).line("another")
    assert screen.getvalue() == "\r\x1b[K50%\r\x1b[Ka line\nanother\n"


def test_a_traceback_is_kept_and_written_where_the_rank_runs_on(tmp_path: Path, pipe: Screen, tail: MakeTail) -> None:
    file = tmp_path / "err"
    reader = tail(file, Terminal(pipe), keeps=True)
    append(file, "before\n[rank0]: Traceback (most recent call last):\n[rank0]: ValueError: caught\n")
    reader.read(0.0)
    assert pipe.getvalue() == "[rank 0] before\n"
    assert not reader.has_shown_traceback
    append(file, "after\n")
    reader.read(6.0)
    assert pipe.getvalue().splitlines()[-2:] == ["[rank 0] [rank0]: ValueError: caught", "[rank 0] after"]
    assert reader.has_shown_traceback


def test_at_the_end_only_the_tracebacks_of_failed_ranks_are_left_to_the_report(tmp_path: Path, pipe: Screen) -> None:
    text = "Traceback (most recent call last):\nValueError: 1\n"
    with RankOutput(Screen(is_terminal=False), pipe) as output:
        for rank in range(2):
            append(tmp_path / str(rank), text)
            output.follow(rank, f"[rank {rank}] ", stdout="", stderr=str(tmp_path / str(rank)))
        output.end(withheld=[1])
    assert pipe.getvalue() == "".join(f"[rank 0] {line}\n" for line in text.splitlines())
    assert [output.shown(rank) for rank in range(3)] == ["lines and traceback", "lines", "nothing"]


def test_a_closed_pipe_does_not_end_the_output(tmp_path: Path, tail: MakeTail) -> None:
    class Closed(Screen):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    append(tmp_path / "out", "a line\n")
    tail(tmp_path / "out", Terminal(Closed(is_terminal=False))).read(0.0)


STORE = """[W1128 04:42:30.3 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=7): got 0 bytes
Exception raised from recvBytes at /__w/pytorch/torch/csrc/distributed/c10d/Utils.hpp:787 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f3c in /x/torch/lib/libc10.so)
frame #1: c10d::TCPStore::get(std::string const&) + 0x8e (0x7f3b in /x/torch/lib/libtorch_cpu.so)
<omitting python frames>
frame #21: _start + 0x21 (0x559b in /x/bin/python)

"""


@pytest.mark.parametrize("is_whole", [False, True])
def test_cpp_frames_of_a_closed_connection_are_left_out_unless_tracebacks_are_asked_for(
    is_whole: bool, tmp_path: Path, pipe: Screen, tail: MakeTail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TRACEBACK", str(int(is_whole)))
    file = tmp_path / "err"
    append(file, STORE + "Traceback (most recent call last):\n" + STORE + "RuntimeError: closed\n")
    reader = tail(file, Terminal(pipe), "", keeps=True)
    reader.end()
    reader.release()
    first = STORE.splitlines()[0]
    short = [first, "", "Traceback (most recent call last):", first, "", "RuntimeError: closed"]
    assert pipe.getvalue().splitlines() == (file.read_text().splitlines() if is_whole else short)
