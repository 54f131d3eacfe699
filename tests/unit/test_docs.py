"""The reference pages say what the source says: every error code has its anchor, and the API page is up to date."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from shoal.config import json_schema, schema_paths
from tests.helpers.forking import run_program

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = sorted((ROOT / "shoal").rglob("*.py"))
ERRORS = ROOT / "docs" / "reference" / "errors.md"


def codes_in(tree: ast.AST) -> Iterator[str]:
    """A pattern for each error code in a file: ``code="..."`` in a call, ``code = "..."`` in a class.

    What an f-string fills in may be any word.
    """
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.Call):
            values = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
        elif isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.Assign) and any(
                    isinstance(t, ast.Name) and t.id == "code" for t in line.targets
                ):
                    values.append(line.value)
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield re.escape(value.value)
            elif isinstance(value, ast.JoinedStr):
                yield "".join(
                    re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"[a-z]+" for part in value.values
                )


@cache
def codes_of_the_source() -> set[str]:
    return {code for path in SOURCES for code in codes_in(ast.parse(path.read_text(encoding="utf-8")))}


def anchors() -> list[str]:
    return re.findall(r"^### (\S+)$", ERRORS.read_text(encoding="utf-8"), flags=re.MULTILINE)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_search_for_codes_finds_constants_classes_and_patterns() -> None:
    text = (
        'class E(Exception):\n    code = "one"\nraise E(code="two")\nraise E(code=f"three-{key}")\nraise E(code=code)'
    )
    assert sorted(codes_in(ast.parse(text))) == ["one", r"three\-[a-z]+", "two"]


def test_every_error_code_has_its_anchor() -> None:
    written = anchors()
    missing = [code for code in codes_of_the_source() if not any(re.fullmatch(code, anchor) for anchor in written)]
    assert sorted(missing) == []


def test_no_anchor_of_an_error_code_is_stale_or_stands_twice() -> None:
    codes, written = codes_of_the_source(), anchors()
    assert len(written) > 50
    assert sorted(a for a in written if not any(re.fullmatch(code, a) for code in codes)) == []
    assert len(written) == len(set(written))


def test_every_error_says_when_it_is_raised_and_what_to_do() -> None:
    """But the root and the defaults that nothing raises, which say so."""
    parts = re.split(r"^### (\S+)$", ERRORS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    silent = [
        code
        for code, text in zip(parts[::2], parts[1::2], strict=True)
        if not ("**Raised**" in text and "**Do**" in text)
    ]
    assert silent == ["shoal", "optimizer", "placement", "tier", "stream"]


def test_the_api_page_is_what_the_script_makes() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    assert script("make_reference").page() == page, "run: python docs/make_reference.py"


def test_the_page_of_the_configuration_and_the_exported_schema_are_up_to_date() -> None:
    folder = ROOT / "docs" / "reference"
    page = script("make_config_page").page()
    assert (folder / "config.md").read_text(encoding="utf-8") == page, "run: python docs/make_config_page.py"
    assert json.loads((folder / "config.schema.json").read_text(encoding="utf-8")) == json_schema()


def test_the_page_of_the_configuration_names_every_key() -> None:
    page = script("make_config_page").page()
    missing = [path for path in schema_paths() if f"| `{path.rpartition('.')[2]}`" not in page]
    assert missing == []


def test_the_tables_of_keys_on_the_page_for_deepspeed_users_are_what_the_script_makes() -> None:
    text = (ROOT / "docs" / "how-to" / "coming-from-deepspeed.md").read_text(encoding="utf-8")
    assert script("make_reference").deepspeed_page(text) == text, "run: python docs/make_reference.py"


def snippets(page: str) -> list[str]:
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_snippet_that_checks_streams_runs() -> None:
    program = snippets("debugging.md")[3]
    done = run_program(program)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d{3} operations, 0 faults\.", done.stdout.splitlines()[-1])


def test_the_snippets_of_the_how_to_pages_run() -> None:
    (precision,) = snippets("precision.md")
    (units,) = snippets("units.md")
    (memory,) = snippets("memory.md")
    timeout, record, *_ = snippets("debugging.md")
    micro_batch = "loss = engine(torch.randint(0, 1024, (2, 16))).square().mean()\nengine.backward(loss)\n"
    program = "\n".join(
        [timeout, precision, "engine.destroy()", units, micro_batch, record, micro_batch, "engine.step()", memory]
    )
    done = run_program(program)
    assert done.returncode == 0, done.stderr
    assert "torch.bfloat16" in done.stdout
    assert "('blocks.3', 526080)" in done.stdout
    assert "0 bytes received" in done.stdout
    assert "'optimizer state': 21037056" in done.stdout


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("curriculum.md", "8 1.0\n16 1.0\n16 0.952\n24 0.909\n24 0.87\n32 0.835\n"),
        ("long-sequences.md", "1 1100\n"),
        ("embeddings.md", "[[1, 2, 3, 4, 5]]\n"),
        ("experts.md", "574784 181568\n"),
        ("parts.md", "0.059\n"),
        ("sharded-models.md", "torch.Size([8, 512]) torch.bfloat16 0.25\ntorch.float32\n"),
    ],
)
def test_the_first_snippet_of_a_page_prints_what_the_page_says(page: str, printed: str) -> None:
    program, *_ = snippets(page)
    done = run_program(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


@pytest.mark.parametrize(
    ("page", "ranks"), [("axes.md", 1), ("expert-parallelism.md", 1), ("the-life-of-a-parameter.md", 2)]
)
def test_the_script_of_a_concept_page_prints_what_the_page_says(page: str, ranks: int, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "concepts" / page).read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    if ranks == 1:
        done = run_program(program)
    else:
        script = tmp_path / "script.py"
        script.write_text(program, encoding="utf-8")
        command = [sys.executable, "-m", "shoal", "run", "--ranks", str(ranks), str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[rank 0] ") for line in done.stdout.splitlines()]
    assert [line for line in lines if line in printed.splitlines()] == printed.splitlines()


def test_the_snippets_of_the_page_on_profiles_run() -> None:
    program = "\n".join(snippets("profile.md"))
    done = run_program(program)
    assert done.returncode == 0, done.stderr
    assert "Flops Profiler: step 0" in done.stdout
    assert "Linear 4.1 KMACs" in done.stdout


def test_every_test_that_the_table_of_faults_names_is_there() -> None:
    text = (ROOT / "docs" / "design" / "faults.md").read_text("utf-8")
    numbers = {
        number.strip(): "`tests/" in row
        for numbers, row in re.findall(r"^\| ([A-Z]\d(?:, [A-Z]\d)*) \| .*? \|(.*)$", text, re.MULTILINE)
        for number in numbers.split(",")
    }
    groups = {"F": 9, "H": 5, "N": 6}
    expected = {f"{group}{number}" for group, last in groups.items() for number in range(1, last + 1)}
    assert numbers == dict.fromkeys(expected | {"S1", "X3", "X4", "E1"}, True)
    named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", text)
    assert len(named) > 20
    for path, name in named:
        functions = [node.name for node in ast.parse((ROOT / path).read_text("utf-8")).body if hasattr(node, "name")]
        assert name in functions, f"{path}::{name}"
