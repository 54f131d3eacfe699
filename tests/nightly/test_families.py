"""Every causal family of Transformers trains as alone on every axis, or the engine says why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

transformers = pytest.importorskip("transformers")

from tests.helpers import families  # noqa: E402, it imports transformers

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # models of all ages
]


@pytest.fixture(scope="module")
def attention_over_ranks() -> Iterator[None]:
    with families.attention_over_ranks():
        yield


@pytest.mark.usefixtures("attention_over_ranks")
@pytest.mark.parametrize("family", families.names())
def test_a_family_trains_as_alone_or_the_engine_says_why_not(family: str) -> None:
    try:
        model = families.build(family)
    except families.CannotBeSmallError as error:
        pytest.skip(f"{family}: {error}"[:200])
    found = {layout: families.outcome(model, layout) for layout in families.LAYOUTS}
    print(family, found)
    assert {kind.split(": ")[0] for kind in found.values()} <= {"equal", "refused", "said", "random"}, found
