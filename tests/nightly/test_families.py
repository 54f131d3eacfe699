"""Every causal family of Transformers trains as alone on every axis, or the engine says why not."""

from __future__ import annotations

from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from shoal.parallel.sequence.huggingface import register  # noqa: E402
from tests.families import LAYOUTS, CannotBeSmallError, build, outcome  # noqa: E402

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # models of all ages
]

FAMILIES = sorted(set(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


@pytest.fixture(scope="module")
def attention_over_ranks() -> Any:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    tables = [each._global_mapping for each in (AttentionMaskInterface, AttentionInterface)]
    before = [dict(table) for table in tables]
    register()
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


@pytest.mark.usefixtures("attention_over_ranks")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_alone_or_the_engine_says_why_not(family: str) -> None:
    try:
        model = build(family)
    except CannotBeSmallError as error:
        pytest.skip(f"{family}: {error}"[:200])
    found = {layout: outcome(model, layout) for layout in LAYOUTS}
    print(family, found)
    assert {what for what in found.values() if what not in ("equal", "refused", "said", "random")} == set(), found
