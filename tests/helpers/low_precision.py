"""What torch's products in few bits compute here."""

from __future__ import annotations

import pytest
import torch

from shoal.parallel.low_precision.products import LowPrecisionProducts


def skip_where_torch_refuses(products: LowPrecisionProducts) -> None:
    """Skip the test if torch's operator does not compute the recipe on CPUs, as 2.11 does not with scales of rows."""
    said = products.refusal(torch.float32, torch.device("cpu"))
    if said is not None and said.startswith("torch's operator says"):
        pytest.skip(said[:120])
