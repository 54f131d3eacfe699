"""Measurements: memory by kind, times, operations, collectives, load of experts; monitors and the report of a run."""

from __future__ import annotations
