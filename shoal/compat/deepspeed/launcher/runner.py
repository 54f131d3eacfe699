"""``deepspeed.launcher.runner``: the `deepspeed` command. See ``shoal.compat.launching`` for its flags."""

from __future__ import annotations

from shoal.compat.environment import file_of_variables
from shoal.compat.launching import (
    command,
    fetch_hostfile,
    main,
    parse_args,
    parse_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
)

DEEPSPEED_ENVIRONMENT_NAME = file_of_variables()
DLTS_HOSTFILE = "/job/hostfile"
_parse_hostfile = parse_hostfile

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DLTS_HOSTFILE",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_resource_filter",
]

if __name__ == "__main__":
    command()
