"""Where bytes and time went: the ledger, the monitor, the report."""

from __future__ import annotations
