"""Measurements of memory and time: the ledger, the monitor, the report."""

from __future__ import annotations
