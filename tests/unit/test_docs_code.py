"""The code of the pages: every Python block compiles, and every command line of Shoal's parses."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from shoal.cli.app import app

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = typer.main.get_command(app)
OWN_PARSER = ("run", "as-deepspeed", "deepspeed", "doctor", "ds-report")  # what follows the script is the script's
OPTION = re.compile(r"--[a-z][a-z0-9-]*")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_of(text: str) -> Iterator[tuple[str, str]]:
    """Fenced and indented blocks: language ("" without one) and text."""
    for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield match[1], match[2]
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for match in re.finditer(r"(?:^    .*\n?)+", rest, flags=re.MULTILINE):
        yield "", textwrap.dedent(match[0])


def commands_of(text: str) -> Iterator[list[str]]:
    """The arguments of each command line of Shoal's."""
    for language, block in code_of(text):
        if language in ("python", "json"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S* )*(?:\S+ .*-m )?shoal ((?:checkpoint )?[a-z].*)", line)
            if found and ". " not in found[1].split("#")[0]:
                yield shlex.split(re.split(r"\s{2,}", found[1])[0], comments=True)  # what it does may follow


def problem_with(arguments: list[str]) -> str | None:
    """What the command line says of these arguments, without running anything."""
    command: Any = COMMANDS
    name, rest = "shoal", arguments
    while hasattr(command, "commands"):
        if not rest or rest[0] not in command.commands:
            return f"no command {' '.join(arguments[:2])}"
        name, *rest = rest
        command = command.commands[name]
    if "-h" in rest or "--help" in rest or name in OWN_PARSER:
        return None
    try:
        command.make_context(name, list(rest))
    except Exception as error:  # click's own, or a copy of it inside typer
        if any(re.fullmatch("[A-Z]+", word) for word in rest) and "No such option" not in str(error):
            return None  # a placeholder, as FORMAT
        return f"shoal {' '.join(arguments)}: {error}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_of_a_page_parses(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for language, block in code_of(text):
        if language == "python" and page.name != "api.md":  # signatures
            ast.parse(textwrap.dedent(block))
    problems = [problem_with(arguments) for arguments in commands_of(text)]
    assert [problem for problem in problems if problem is not None] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_options_that_a_sentence_names_are_options_of_its_command(page: Path) -> None:
    unknown = []
    for span in re.findall(r"`(shoal [^`\n]+)`", page.read_text(encoding="utf-8")):
        words = span.split()[1:]
        name, commands = words[0], COMMANDS.commands
        if hasattr(commands.get(name), "commands") and len(words) > 1:
            name, commands = words[1], commands[name].commands  # type: ignore[attr-defined]
        if name in OWN_PARSER or name not in commands:
            continue
        known = {
            option for parameter in commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        unknown += [f"{span}: {option}" for option in OPTION.findall(span) if option not in known | {"--help"}]
    assert unknown == []


def test_a_wrong_command_line_would_be_found() -> None:
    page = "Run\n\n    shoal train --stage 5  # too high\n    shoal trian\n\n```sh\nshoal report\n```\n"
    found = [problem_with(arguments) for arguments in commands_of(page)]
    assert "issing" in str(found[0])
    assert re.search("range|less than", str(found[1]))
    assert found[2] == "no command trian"
