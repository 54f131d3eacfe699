"""How commands are listed, and how their usage reads: ``shoal run [OPTIONS] SCRIPT [ARGS]...``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

from shoal.errors import ConfigError, ModelError, UsageError

# In the order in which they are used.
_ORDER = (
    "run",
    "train",
    "report",
    "doctor",
    "estimate",
    "plan",
    "tune",
    "verify",
    "data",
    "checkpoint",
    "convert",
    "schedule",
    "quorum",
    "deepspeed",
    "as-deepspeed",
)


MODEL_HELP = (
    "A Hugging Face folder or config.json, a size of `shoal train` (124m, 6.7b, ...), or module:function, a function"
    " without arguments that returns the model."
)


def checkpoints_of(folder: str) -> str:
    """The folder of checkpoints inside the folder of a run of ``shoal train``; any other folder itself."""
    from shoal.cli.job import JOB_FILE, checkpoint_folder

    inside = checkpoint_folder(Path(folder))
    return str(inside) if inside.is_dir() and (Path(folder) / JOB_FILE).is_file() else folder


class UsageCommand(TyperCommand):
    """A command whose usage names its arguments as ``SCRIPT`` and ``[ARGS]...``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = [self.options_metavar] if self.options_metavar else []
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                name = str(parameter.name).upper()
                pieces.append((name if parameter.required else f"[{name}]") + ("..." if parameter.nargs != 1 else ""))
        return pieces


class OrderedGroup(TyperGroup):
    """Lists the commands in ``_ORDER``, then the others."""

    def list_commands(self, ctx: Any) -> list[str]:
        rank = {name: at for at, name in enumerate(_ORDER)}
        return sorted(super().list_commands(ctx), key=lambda name: rank.get(name, len(rank)))


def exit_code_of(error: Exception) -> int:
    """2 for what the user wrote, 1 for what happened while it was done."""
    return 2 if isinstance(error, ConfigError | ModelError | UsageError) else 1
