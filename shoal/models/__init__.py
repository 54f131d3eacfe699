"""Models that Shoal's own jobs, tests and benchmarks train."""

from __future__ import annotations

from shoal.models.gpt import GPT, NAMED_SHAPES, Block, GPTConfig, named_config, nearest_config, parse_count

__all__ = ["GPT", "NAMED_SHAPES", "Block", "GPTConfig", "named_config", "nearest_config", "parse_count"]
