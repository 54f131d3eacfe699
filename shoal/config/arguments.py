"""The command-line arguments that DeepSpeed's scripts expect."""

from __future__ import annotations

import argparse

HELP = "accepted for scripts written for DeepSpeed; has no effect"


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed``, ``--deepspeed_config`` and their oldest spellings to a parser.

    Returns: the same parser.
    """
    group = parser.add_argument_group("Shoal", "the configuration of the engine")
    group.add_argument("--deepspeed", default=False, action="store_true", help=HELP)
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the configuration, a JSON file")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser
