"""``python -m shoal.compat.deepspeed SCRIPT ...``: run a script for which ``import deepspeed`` is Shoal."""

from __future__ import annotations

from shoal.compat.script import main

if __name__ == "__main__":
    main()
