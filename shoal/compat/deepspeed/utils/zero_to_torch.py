"""``deepspeed.utils.zero_to_torch``: whole weights out of a checkpoint, in a format of one's choice."""

from __future__ import annotations

from shoal.compat.zero_to_fp32 import main_to_torch as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
