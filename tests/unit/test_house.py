"""The rules of this repository, as tests: what no file may contain, and what every page must have."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.forking import run_program

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "shoal"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A call or an import that turns data into code, hands a string to a shell, or races for a file name.
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "torch.save",
    "os.system",
    "os.popen",
    "yaml.load",
    "tempfile.mktemp",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
}
# What `import shoal` leaves for later, because it takes long and few runs need it.
HEAVY = ("tensorboard", "rich", "typer", "click", "torch._dynamo", "torch._inductor", "wandb", "tokenizers")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or an attribute; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def uses(tree: ast.AST, name: str) -> Iterator[int]:
    """Lines that import a dotted name or something below it, or speak of it as an attribute."""
    for line, module in imported(tree):
        if module == name or module.startswith(name + "."):
            yield line
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node) == name:
            yield node.lineno


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    yield
    tree_of.cache_clear()


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in SOURCES:
        yield relative(path), tree_of(path)


def places_of(name: str, allowed: tuple[str, ...]) -> list[str]:
    files = [(place, tree) for place, tree in trees() if not place.startswith(allowed)]
    return [f"{place}:{line}" for place, tree in files for line in sorted(uses(tree, name))]


def test_the_search_for_names_finds_what_it_looks_for() -> None:
    tree = ast.parse("import torch\nfrom torch import cuda\nimport torch.cuda.nvtx\ntorch.cuda.empty_cache()")
    assert sorted(uses(tree, "torch.cuda")) == [2, 3, 4]


def test_no_module_imports_what_runs_data() -> None:
    found = [
        f"{place}:{line} {module}"
        for place, tree in trees()
        for line, module in imported(tree)
        if module.partition(".")[0] in FORBIDDEN_IMPORTS
    ]
    assert found == []


def test_no_call_runs_data_or_a_shell() -> None:
    found = []
    for place, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            is_tensors_only = place.startswith("shoal/checkpoint/formats/") and any(
                keyword.arg == "weights_only" for keyword in node.keywords
            )
            if dotted(node.func) in FORBIDDEN_CALLS and not is_tensors_only:
                found.append(f"{place}:{node.lineno} {dotted(node.func)}")
            for keyword in node.keywords:
                if keyword.arg == "shell" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    found.append(f"{place}:{node.lineno} shell=")
                if keyword.arg == "weights_only" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                ):
                    found.append(f"{place}:{node.lineno} weights_only=")
    assert found == []


# Makers of tensors that ask for the script's default device, and those that ask for its default dtype.
ON_DEFAULT_DEVICE = {"arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn"} | {
    "as_tensor",
    "randperm",
    "tensor",
    "zeros",
}
IN_DEFAULT_DTYPE = ON_DEFAULT_DEVICE - {"arange", "as_tensor", "randint", "randperm"}
# Parameters and buffers of modules follow the defaults, and so do the inputs of the script's model.
FOLLOW_DEFAULTS = (
    "shoal/cli/",
    "shoal/models/",
    "shoal/observe/flops_profiler.py",
    "shoal/parallel/expert/bias.py",
    "shoal/parallel/expert/stacked.py",
    "shoal/parallel/loss.py",
    "shoal/planner/",
)


def test_tensors_do_not_depend_on_the_scripts_default_device_and_dtype() -> None:
    found = []
    for place, tree in trees():
        for node in ast.walk(tree) if not place.startswith(FOLLOW_DEFAULTS) else ():
            maker = dotted(node.func).removeprefix("torch.") if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and f"torch.{maker}" == dotted(node.func):
                given = {keyword.arg for keyword in node.keywords}
                needed = {"device"} if maker in ON_DEFAULT_DEVICE else set()
                needed |= {"dtype"} if maker in IN_DEFAULT_DTYPE else set()
                found += [f"{place}:{node.lineno} torch.{maker} without {name}" for name in needed - given]
    assert found == []


def test_only_device_and_comm_name_cuda() -> None:
    assert places_of("torch.cuda", allowed=("shoal/device.py", "shoal/comm/")) == []


def test_only_comm_and_launch_name_torch_distributed() -> None:
    # torch.distributed.checkpoint is a format: its own modules read and write it, without a collective.
    # deepspeed.comm and deepspeed.utils.groups are torch's functions and groups under other names; initialize() is
    # given a DeviceMesh.
    # torch.distributed.pipelining computes orders of actions, and splits a backward, without a group.
    pipelining = ("shoal/pipeline/schedule.py", "shoal/pipeline/run.py")
    of_torch = ("shoal/compat/collectives.py", "shoal/compat/groups.py", "shoal/engine/entry.py")
    allowed = ("shoal/comm/", "shoal/launch/", "shoal/checkpoint/formats/dcp", *pipelining, *of_torch)
    assert places_of("torch.distributed", allowed=allowed) == []


def test_the_environment_is_read_in_one_kind_of_file_and_written_in_none() -> None:
    reads, writes = [], []
    for place, tree in trees():
        # The first passes the alias on to child processes. Gloo and NCCL take an interface from the environment only.
        if place in ("shoal/compat/environment.py", "shoal/comm/environment.py"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and dotted(node.func) in ("os.putenv", "os.unsetenv"):
                writes.append(f"{place}:{node.lineno}")
            if isinstance(node, ast.Call) and dotted(node.func) in (
                "os.environ.update",
                "os.environ.setdefault",
                "os.environ.pop",
                "os.environ.clear",
            ):
                writes.append(f"{place}:{node.lineno}")
            if (
                isinstance(node, ast.Subscript)
                and dotted(node.value) == "os.environ"
                and not isinstance(node.ctx, ast.Load)
            ):
                writes.append(f"{place}:{node.lineno}")
        # child.py is the start of a rank: it passes the environment on to the program that it executes.
        if not place.endswith(("/environment.py", "shoal/launch/child.py")):
            reads += [f"{place}:{line}" for name in ("os.environ", "os.getenv") for line in uses(tree, name)]
    assert writes == []
    assert reads == []


def test_no_module_but_the_command_line_and_compat_imports_shoal() -> None:
    """``shoal/__init__.py`` imports every layer, so a layer that imports it imports upward."""
    found = [
        f"{place}:{line}"
        for place, tree in trees()
        if place != "shoal/__init__.py" and not place.startswith(("shoal/cli/", "shoal/compat/"))
        for line, module in imported(tree)
        if module == "shoal"
    ]
    assert found == []


def test_every_package_is_in_a_layer_of_the_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    floors = {name for layer in contract["layers"] for name in re.findall(r"\w+", layer)}
    rooms = {
        path.stem if path.is_file() else path.name
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" and path.stem not in ("__init__", "__main__")) or any(path.glob("*.py"))
    }
    assert rooms - floors == set()


def test_there_is_no_package_for_leftovers() -> None:
    deepspeed = PACKAGE / "compat" / "deepspeed"  # its modules have DeepSpeed's names
    own = [path for path in SOURCES if deepspeed not in path.parents]
    names = {part for path in own for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert names & {"utils", "util", "helpers", "common", "misc"} == set()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_file_opens_with_a_sentence_and_postpones_annotations(path: Path) -> None:
    tree = tree_of(path)
    if not tree.body:
        pytest.skip("an empty file has nothing to say")
    docstring = ast.get_docstring(tree)
    assert docstring, "no docstring that says what the file is"
    has_code = any(not isinstance(node, (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)) for node in tree.body)
    if has_code:
        futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        assert any(alias.name == "annotations" for node in futures for alias in node.names)


# Import circles that are still there. Delete an entry with its circle.
KNOWN_CIRCLES: list[str] = []


def imports_of(tree: ast.AST, modules: set[str]) -> set[str]:
    """The ones of ``modules`` that a file imports, wherever in the file (lazily and for type checking too)."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not looked for here"
            found |= {
                submodule if (submodule := f"{node.module}.{alias.name}") in modules else str(node.module)
                for alias in node.names
            }
    return found & modules


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for module in graph:
        reached[module], waiting = set(), [module]
        while waiting:
            new = graph[waiting.pop()] - reached[module]
            reached[module] |= new
            waiting += new
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert circles(graph) == {frozenset("bc"), frozenset("e")}
    tree = ast.parse("import p.a\nfrom p import b, Name\ndef f():\n    from p.c import d\n")
    assert imports_of(tree, {"p", "p.a", "p.b", "p.c"}) == {"p", "p.a", "p.b", "p.c"}
    assert imports_of(tree, {"p.a", "p.c.d"}) == {"p.a", "p.c.d"}


def test_no_modules_import_each_other_but_the_known_ones() -> None:
    """Inside packages too, which the contract about layers does not check."""
    parsed = {place.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree for place, tree in trees()}
    found = circles({module: imports_of(tree, set(parsed)) for module, tree in parsed.items()})
    known = [frozenset(circle.split()) for circle in KNOWN_CIRCLES]
    new = [sorted(circle) for circle in found if not any(circle <= other for other in known)]
    gone = [sorted(circle) for circle in known if not any(other <= circle for other in found)]
    assert new == [], "these modules import each other: move what both need into a third one"
    assert gone == [], "these circles are gone: delete them from KNOWN_CIRCLES"


def class_names(tree: ast.AST, prefix: str = "") -> set[str]:
    """The classes that a file defines under names with a prefix, wherever in the file; without leading underscores."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return {name.lstrip("_") for name in names if name.startswith(prefix)}


def test_class_names_are_found() -> None:
    tree = ast.parse("class A:\n    class _B: ...\ndef f():\n    class __C: ...\n")
    assert class_names(tree) == {"A", "B", "C"}
    assert class_names(tree, "_") == {"B", "C"}


def test_no_class_name_is_used_twice() -> None:
    """Except in compat, where the public classes have DeepSpeed's names."""
    places: dict[str, list[str]] = {}
    for place, tree in trees():
        for name in class_names(tree, "_" if place.startswith("shoal/compat/") else ""):
            places.setdefault(name, []).append(place)
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert shared == {}, "these names are used for more than one class: rename all but one"


def in_a_new_process(program: str) -> object:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_public_names_of_shoal_load_nothing_heavy() -> None:
    """Time is measured by benchmarks/import_time.py; here only what would make it long is looked for."""
    program = (
        "import json, sys, torch\nbefore = set(sys.modules)\nimport shoal\n"
        "assert all(getattr(shoal, name) is not None for name in shoal.__all__)\n"
        f"print(json.dumps(sorted(name for name in {HEAVY!r} if name in sys.modules and name not in before)))"
    )
    assert in_a_new_process(program) == []


def test_import_shoal_starts_no_thread_and_says_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import torch, threading; n = threading.active_count(); import shoal; "
         "assert threading.active_count() == n"],
        capture_output=True, text=True, timeout=50, cwd=ROOT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_public_names_are_sorted_present_and_documented() -> None:
    import inspect

    import shoal

    names = list(shoal.__all__)
    assert names == sorted(names)
    undocumented = []
    for name in names:
        thing = getattr(shoal, name)
        can_speak = inspect.isclass(thing) or inspect.isfunction(thing) or inspect.ismodule(thing)
        if can_speak and not inspect.getdoc(thing):
            undocumented.append(name)
    assert undocumented == []


def markdown_pages() -> list[Path]:
    outside = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
    return sorted(page for page in [*outside, *(ROOT / "docs").rglob("*.md")] if page.exists())


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings make, as code hosts write them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+\s+(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", markdown_pages(), ids=relative)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_the_smallest_script_of_the_readme_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    program = text[text.index("```python\n") + 10 :]
    program = program[: program.index("```")]
    assert "shoal.initialize(" in program
    done = run_program(program)
    assert done.returncode == 0, done.stderr


def test_the_linter_reads_every_file_of_the_package() -> None:
    """By default it leaves out every folder that is called ``build``."""
    ruff = Path(sys.executable).parent / "ruff"
    if not ruff.exists():
        pytest.skip("ruff is not installed in this environment")
    done = subprocess.run(
        [ruff, "check", "--show-files", PACKAGE], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert {Path(line) for line in done.stdout.splitlines() if line.endswith(".py")} == set(SOURCES)
