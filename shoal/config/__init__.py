"""The configuration: DeepSpeed's JSON file, read strictly, with every key supported, explained or refused."""

from __future__ import annotations

from shoal.config.config import Config, Examined, examine, load, schema_paths
from shoal.config.json_schema import json_schema
from shoal.config.problems import ConfigProblems, ConfigWarning, Problem
from shoal.config.source import add_config_arguments
from shoal.config.support import Support, support_of

__all__ = [
    "Config",
    "ConfigProblems",
    "ConfigWarning",
    "Examined",
    "Problem",
    "Support",
    "add_config_arguments",
    "examine",
    "json_schema",
    "load",
    "schema_paths",
    "support_of",
]
