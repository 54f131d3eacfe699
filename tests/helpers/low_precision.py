"""What torch's products in few bits compute here."""

from __future__ import annotations

import pytest
import torch

from shoal.parallel.low_precision import products as low_precision
from shoal.parallel.low_precision.products import LowPrecisionProducts


def skip_where_torch_refuses(products: LowPrecisionProducts) -> None:
    """Skip the test if torch's operator does not compute the recipe on CPUs, as 2.11 does not with scales of rows.

    No version computes there with scales of blocks: these are emulated.
    """
    said = products.refusal(torch.float32, torch.device("cpu"))
    if said is None:
        return
    products.refused = frozenset([*products.refused, torch.float32, torch.bfloat16, torch.float16])
    output = products.recipe.output
    has_blocks = output is not None and low_precision._width(output[0]) is not None
    if said.startswith("torch's operator says") and not has_blocks:
        pytest.skip(said[:120])
