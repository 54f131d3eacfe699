"""Writes what pages say of the source: docs/reference/api.md from signatures and docstrings, tables of keys.

python docs/make_reference.py
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "reference" / "api.md"
DEEPSPEED_PAGE = PAGE.parent.parent / "how-to" / "coming-from-deepspeed.md"
BEGIN, END = "<!-- made by docs/make_reference.py: {} -->", "<!-- end -->"
SECTIONS = ("Args", "Returns", "Raises", "Communicates", "Memory", "Order", "Source")

INTRODUCTION = """\
# The Python API

Generated from the docstrings by `python docs/make_reference.py`; a test keeps it up to date. Errors are listed in
[errors](errors.md), keys of the configuration in [configuration](config.md). *Every rank* means that all ranks call,
in the same order. Ψ (Psi) is the number of parameters.
"""

# What the engine keeps as plain attributes. Those that are parts of the machinery are left out.
ENGINE_ATTRIBUTES = {
    "module": "the model that was passed to `initialize`, with its parameters sharded",
    "client_optimizer": "the torch optimizer inside it, from the config or the script",
    "parts": "what joins its steps, those of `initialize` last",
    "on_step": "callables that get the engine after each step",
    "client_state_on_signal": "a function that returns the client state for `checkpoint.save_on_signal`; or None",
    "world": "the world of ranks; `world.recorder` has the last 1,024 collectives",
    "plan": "the settings that follow from the config",
    "timers": "time by phase, with `wall_clock_breakdown`",
}
ENGINE_INSIDE = {
    "access",
    "accumulation",
    "axes",
    "checkpointing",
    "compiled",
    "offloaded",
    "properties",
    "run_state",
    "sharded",
    "sharded_optimizer",
    "sharding",
    "weights",
}

FACE = [
    ("shoal", ["initialize", "init_distributed", "add_config_arguments", "load_hf"]),
    ("shoal", ["attention", "sequence_parallel", "SequenceContext", "Documents"]),
    ("shoal", ["PipelineModule", "LayerSpec", "TiedLayerSpec"]),
    ("shoal", ["Part"]),
    ("shoal.parallel.sequence.huggingface", ["register"]),
    ("shoal.comm.world", ["current_world", "World"]),
]
WORLD_ATTRIBUTES = {
    "rank": "of this process, over all nodes",
    "size": "ranks in all",
    "local_rank": "of this process, on its node",
    "device": "the device of this rank",
    "backend": "`threads`, `gloo`, `nccl`, `fake`, or `none` for one rank without a process group",
    "recorder": "the collectives that this rank issued: `last`, `table()`, and `with recorder.recording() as entries`",
    "heartbeat": "what this rank is doing, for the launcher that looks for hangs",
    "mesh": "that of the engine that was created last",
    "compares_calls": "`debug.collective_check` of that engine",
    "is_closed": "after `close()`",
    "shared": "a dict that ranks which are threads of one process share; None for processes",
    "stages": "in `shoal.dry_run_pipeline` what the stages share; else None",
    "ranks_per_node": "in a dry run the GPUs of a node of its machine; else None",
}


def page() -> str:
    """The whole page."""
    import shoal

    parts = [INTRODUCTION, "## shoal\n", f"`shoal.__all__`: {', '.join(f'`{name}`' for name in shoal.__all__)}.\n"]
    for module, names in FACE:
        for name in names:
            thing = getattr(importlib.import_module(module), name)
            attributes = WORLD_ATTRIBUTES if name == "World" else {}
            parts += [*entry(f"{module}.{name}", thing, 3), *table(thing, attributes, set())]
            if inspect.isclass(thing):
                parts += methods(thing)
    engine = importlib.import_module("shoal.engine.engine").Engine
    parts += ["## The engine\n", *entry("shoal.Engine", engine, 3, signature=False)]
    parts += table(engine, ENGINE_ATTRIBUTES, ENGINE_INSIDE)
    parts += methods(engine)
    theirs = importlib.import_module("shoal.compat.engine").DeepSpeedEngine
    parts += ["### DeepSpeed's names\n", said(theirs), *methods(theirs, without=set(dir(engine)))]
    optimizer = importlib.import_module("shoal.running.optimizer").ShardedOptimizer
    parts += ["## The optimizer\n", *entry("ShardedOptimizer", optimizer, 3, signature=False), *methods(optimizer)]
    theirs = importlib.import_module("shoal.compat.optimizer").DeepSpeedShardedOptimizer
    parts += ["### DeepSpeed's names of the optimizer\n", said(theirs), *methods(theirs, without=set(dir(optimizer)))]
    parts += ["## shoal.zero\n"]
    for name in shoal.zero.__all__:
        parts += entry(f"shoal.zero.{name}", getattr(shoal.zero, name), 3)
    parameters = importlib.import_module("shoal.access.engine_parameters").EngineParameters
    owner = importlib.import_module("shoal.running.parameter_owner").ParameterOwner
    parts += [
        "### What the safe accessors do\n",
        "Each finds its parameter's engine and calls one of these methods.\n",
        *methods(parameters, without={"knows", "engine", *vars(owner)}),
    ]
    ledger = importlib.import_module("shoal.observe.ledger")
    parts += ["## The ledger\n", "What `engine.memory_report()` returns.\n"]
    for thing in (ledger.Ledger, ledger.LedgerEntry):
        parts += [*entry(thing.__name__, thing, 3), *methods(thing)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def deepspeed_page(text: str) -> str:
    """The page with its tables of keys made anew."""
    from shoal.config.support import PARAMS, SUPPORT

    table = {**SUPPORT, **{f"optimizer.params.{name}": support for name, support in PARAMS.items()}}
    for kind in ("no effect", "refused", "not built"):
        by_reason: dict[str, list[str]] = {}
        for path, support in table.items():
            if support.kind == kind:
                by_reason.setdefault(support.reason, []).append(f"`{path}`")
        rows = [
            (reason, paths) if kind == "not built" else (", ".join(paths), [reason])
            for reason, paths in by_reason.items()
        ]
        heads = "| part | keys |" if kind == "not built" else "| key | |"
        lines = [heads, "| --- | --- |", *(f"| {left} | {', '.join(right)} |" for left, right in rows)]
        begin = BEGIN.format(kind)
        start = text.index(begin) + len(begin)
        text = text[:start] + "\n" + "\n".join(lines) + "\n" + text[text.index(END, start) :]
    return text


def entry(title: str, thing: Any, level: int, *, signature: bool = True) -> list[str]:
    """Heading, signature and docstring of one function or class."""
    lines = [f"{'#' * level} {title}\n"]
    text = signature_of(thing) if signature else ""
    if text:
        lines.append(f"```python\n{text}\n```\n")
    return [*lines, said(thing)]


def said(thing: Any) -> str:
    """The docstring as Markdown."""
    written = thing.__doc__
    if not written:
        return ""
    text = inspect.cleandoc(written).replace("``", "`")
    lines, arguments = [], False
    for line in text.split("\n"):
        match = re.match(rf"({'|'.join(SECTIONS)}):(?: (.*))?$", line)
        if match:
            arguments = not match[2]
            lines += ["", f"**{match[1]}** {match[2] or ''}".rstrip(), *([""] if arguments else [])]
        elif arguments and re.match(r" {4}\w[\w, ]*: ", line):
            name, _, rest = line.strip().partition(": ")
            lines.append(f"- `{name}`: {rest}")
        elif arguments and line.startswith(" " * 8):
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
            arguments = arguments and bool(line)
    return "\n".join(lines).strip("\n") + "\n"


def definition(thing: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def signature_of(thing: Any) -> str:
    """The signature as it is written; of a class that of its constructor, or a dataclass's fields."""
    node = definition(thing)
    if isinstance(node, ast.ClassDef):
        made = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if made is None:
            fields = [ast.unparse(n) for n in node.body if isinstance(n, ast.AnnAssign)]
            return f"{node.name}({', '.join(fields)})" if fields else ""
        return written(node.name, made, returns=False)
    assert isinstance(node, ast.FunctionDef)
    return written(node.name, node)


def written(name: str, node: ast.FunctionDef, *, returns: bool = True) -> str:
    pieces = list(arguments_of(node.args))
    end = f" -> {ast.unparse(node.returns)}" if returns and node.returns is not None else ""
    line = f"{name}({', '.join(pieces)}){end}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {piece},\n" for piece in pieces) + f"){end}"


def arguments_of(node: ast.arguments) -> Iterator[str]:
    """Each argument as it is written, `self` left out."""
    plain = [*node.posonlyargs, *node.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(node.defaults)) + list(node.defaults)
    for argument, default in zip(plain, defaults, strict=True):
        if argument.arg != "self":
            yield one(argument, default)
    if node.vararg:
        yield f"*{one(node.vararg, None)}"
    elif node.kwonlyargs:
        yield "*"
    for argument, default in zip(node.kwonlyargs, node.kw_defaults, strict=True):
        yield one(argument, default)
    if node.kwarg:
        yield f"**{one(node.kwarg, None)}"


def one(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    return f"{argument.arg}{kind}" + (f" = {ast.unparse(default)}" if default is not None else "")


def attributes_of(cls: type) -> list[str]:
    """Public attributes that the constructor sets."""
    node = definition(cls)
    assert isinstance(node, ast.ClassDef)
    made = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    found = []
    for line in ast.walk(made):
        one_target = [line.target] if isinstance(line, ast.AnnAssign) else []
        targets = line.targets if isinstance(line, ast.Assign) else one_target
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found.append(target.attr)
    return [name for name in dict.fromkeys(found) if not name.startswith("_")]


def table(cls: Any, described: dict[str, str], inside: set[str]) -> list[str]:
    """Attributes and what they are. An attribute that nobody has described stops the script."""
    if not described:
        return []
    unknown = set(attributes_of(cls)) ^ (set(described) | inside)
    if unknown:
        raise SystemExit(
            f"describe or strike in docs/make_reference.py: {', '.join(sorted(unknown))} of {cls.__name__}"
        )
    return ["| attribute | |\n| --- | --- |", *(f"| `{name}` | {text} |" for name, text in described.items()), ""]


def methods(cls: type, without: Collection[str] = ()) -> Iterator[str]:
    """Every public method and property, in the order of the source; then those of the classes that it is made of.

    Members that a table makes have no definition of their own, and are left out.
    """
    made_of = [base for base in cls.__mro__ if base.__module__.startswith("shoal.")]
    members: dict[str, Any] = {}
    for base in made_of:
        members = {**members, **{name: member for name, member in vars(base).items() if name not in members}}
    for name, member in members.items():
        if name.startswith("_") or name == "knows" or name in without:
            continue
        if isinstance(member, property):
            if not inspect.isfunction(member.fget):
                continue
            node = definition(member.fget)
            assert isinstance(node, ast.FunctionDef)
            kind = f": {ast.unparse(node.returns)}" if node.returns else ""
            yield f"#### {cls.__name__}.{name}\n"
            yield f"```python\n{name}{kind}\n```\n"
            yield said(member) if member.__doc__ else ""
        else:
            function = getattr(member, "__wrapped__", member)
            if inspect.isfunction(function) and function.__name__ == name:
                yield f"#### {cls.__name__}.{name}\n"
                yield f"```python\n{signature_of(function)}\n```\n"
                yield said(function)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    DEEPSPEED_PAGE.write_text(deepspeed_page(DEEPSPEED_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
