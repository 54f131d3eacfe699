"""Any state on the host or on a disk, and any action between micro-batches: the bits of training on the device."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.composing import NUM_BLOCKS, WIRES, Action, Case, Layout, differences, load_into, play, same
from tests.ranks.offload.test_offload import make_apart


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """``offload_states`` collects garbage, which takes long among the objects of all the tests before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


NAMES = ["embedding.weight", "blocks.0.inner.weight", "blocks.1.scale", "blocks.2.outer.weight"]
KINDS = ["optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"]

_name = st.sampled_from(NAMES)
_anywhere = st.one_of(
    st.sampled_from(
        [
            ("eval",),
            ("empty",),
            ("ledger",),
            ("state_dict",),
            ("save",),
            ("save",),
            ("load",),
            ("lr", 0.01),
            ("lr", 0.1),
        ]
    ),
    st.tuples(st.just("get"), _name),
    st.tuples(st.just("set"), _name, st.sampled_from([0.5, -0.25])),
    st.tuples(st.just("set_state"), _name, st.sampled_from([0.5, 0.0])),
    st.tuples(st.just("gathered"), _name, st.sampled_from([0.5, -1.0])),
    st.tuples(st.just("offload"), st.sampled_from([None, *([kind] for kind in KINDS)])),
    st.tuples(st.just("load_module"), st.sampled_from([1.0, 0.5])),
)
_before = st.one_of(
    _anywhere,
    st.just(("no_sync",)),
    st.just(("anew",)),
    st.tuples(st.just("without"), st.integers(0, NUM_BLOCKS - 1)),
    st.tuples(st.just("fails"), st.integers(0, NUM_BLOCKS - 1)),
    st.tuples(st.just("factor"), st.sampled_from([None, float("inf"), 1e3])),
)
_after = st.one_of(
    _anywhere,
    st.just(("again",)),
    st.just(("zero",)),
    st.tuples(st.just("set_gradient"), _name, st.sampled_from([3.0, 0.0])),
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    stage = draw(st.sampled_from([0, 1, 2, 3, 3, 3]))
    size = draw(st.sampled_from([1, 2, 2, 3, 4]))
    hybrids: list[tuple[tuple[str, int], ...]] = [()]
    tp = draw(st.sampled_from([1, 1, 2])) if size in (2, 4) else 1
    if tp > 1:
        pass
    elif size == 4:
        hybrids = [(("mics_shard_size", 2),)] + [(("zero_hpz_partition_size", 2),)] * (stage == 3)
    elif size > 1:
        hybrids.append((("mics_shard_size", 1),))
    return Layout(
        stage=stage,
        size=size,
        hybrid=draw(st.sampled_from(hybrids)),
        state=draw(st.sampled_from(["none", "cpu", "ahead", "ahead", "ratio", "nvme"])) if stage else "none",
        parameters=draw(st.sampled_from(["none", "cpu", "nvme", "some"])) if stage == 3 else "none",
        is_apart=draw(st.sampled_from([True, True, False])),
        tp=tp,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    accumulation = draw(st.sampled_from([1, 1, 2, 3]))
    num = draw(st.integers(2, 4)) * accumulation
    steps = []
    for _ in range(num):
        before = draw(st.lists(_before, max_size=2))
        after = draw(st.lists(_after, max_size=2))
        steps.append((tuple(before), tuple(after)))
    return Case(
        precision=draw(
            st.sampled_from(["fp32", "fp32", "bf16", "bf16", "fp16", "fp16 fixed", "bf16 alone", "autocast"])
        ),
        optimizer=draw(
            st.sampled_from(
                ["AdamW", "AdamW", "SGD", "momentum", "Adagrad", "Lion", "Lamb", "Muon", "client", "client foreach"]
            )
        ),
        accumulation=accumulation,
        clip=draw(st.sampled_from([0.0, 0.05, 1.0, 100.0])),
        recompute=draw(st.sampled_from(["no", "no", "device", "host"])),
        numbers=draw(
            st.sampled_from(
                [
                    (),
                    (("stage3_prefetch_bucket_size", 0),),
                    (("stage3_max_live_parameters", 100),),
                    (("stage3_max_reuse_distance", 1_000_000_000),),
                    (("reduce_bucket_size", 40),),
                    (("sub_group_size", 30),),
                ]
            )
        ),
        is_async=draw(st.booleans()),
        wire=draw(st.sampled_from(["plain", "plain", "plain", *WIRES])),
        is_sparse=draw(st.sampled_from([False, False, True])),
        script=tuple(steps),
    )


@settings(max_examples=settings.default.max_examples // 4)
@given(case=cases(), layout=layouts(), other=layouts())
def test_no_tier_changes_a_bit_whatever_is_done(case: Case, layout: Layout, other: Layout) -> None:
    is_whole = case.wire == "difference" and 3 in (layout.stage, other.stage)
    if is_whole or (layout.tp > 1 and case.is_sparse):  # errors
        case = replace(case, wire="plain", is_sparse=False)
    compare(case, layout, other)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("hybrid", [(), (("mics_shard_size", 1),)])
def test_a_second_pass_after_the_reduction_is_rounded_once(stage: int, hybrid: tuple[tuple[str, int], ...]) -> None:
    """Its gradient is summed over the replicas by itself, and added to a 16-bit sum."""
    case = Case("bf16", "AdamW", 1, 0.0, "no", (), is_async=False, script=(((), ()), ((), (("again",),))))
    compare(case, Layout(stage, size=2, hybrid=hybrid, state="cpu", parameters="none", is_apart=True))


@pytest.mark.parametrize("wire", ["gather", "feedback"])
def test_frozen_parameters_are_loaded_exactly_whatever_is_gathered(wire: str) -> None:
    compare(Case(wire=wire, script=(((), ()), ((), ()))), Layout(3, size=2), Layout(1, size=3, is_apart=False))


@pytest.mark.parametrize(
    ("stage", "size", "hybrid"),
    [
        (0, 2, ()),
        (1, 2, ()),
        (2, 2, ()),
        (3, 2, ()),
        (1, 3, (("mics_shard_size", 1),)),
        (3, 3, (("mics_shard_size", 1),)),
    ],
)
def test_what_reductions_have_lost_moves_with_the_gradients(
    stage: int, size: int, hybrid: tuple[tuple[str, int], ...]
) -> None:
    script = (((), ()), ((("offload", None),), ()), ((), (("offload", ["lp_grads"]), ("ledger",))))
    compare(Case(wire="feedback", script=script), Layout(stage, size, hybrid))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_the_gradient_of_a_block_that_a_pass_leaves_out_is_as_on_the_device(stage: int, size: int) -> None:
    left_out = ((("without", 1),), (("get", "blocks.1.scale"), ("set_gradient", "blocks.1.scale", 3.0)))
    case = Case(accumulation=3, script=(left_out, ((), ()), ((("without", 1),), ()), ((), ()), ((), ()), left_out))
    compare(case, Layout(stage, size, state="cpu", parameters="none", is_apart=True))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_passes_in_no_sync_are_added_in_order(stage: int, size: int, precision: str) -> None:
    script: tuple[tuple[tuple[Action, ...], tuple[Action, ...]], ...] = (((), ()), ((("no_sync",),), ()))
    case = Case(precision, "AdamW", 2, 0.0, "no", (), is_async=False, script=script)
    compare(case, Layout(stage, size, state="cpu", parameters="none", is_apart=True))


def compare(case: Case, layout: Layout, other: Layout | None = None) -> None:
    threads = set(threading.enumerate())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, pytest.MonkeyPatch.context() as patch:
        root = Path(name)
        make_apart(patch, is_apart=False)
        plain = play(case, layout.plain(), root / "none", root / "plain")
        make_apart(patch, is_apart=layout.is_apart)
        away = play(case, layout, root / "disk", root / "away")
        assert list((root / "disk").iterdir()) == []
        found = differences(plain, away)
        assert not found, "\n".join(found[:4])
        owners = [owner for played in away for owner in played.owners]
        if other is not None:
            make_apart(patch, is_apart=other.is_apart)
            for values in load_into(case, other, root / "disk", root / "away"):
                assert away[0].saved is not None
                for key, value in away[0].saved.items():
                    assert same(value, values[key]), f"{key} after loading into another layout"
            assert list((root / "disk").iterdir()) == []
        del away, plain
    gc.collect()
    alive = [owner() for owner in owners if owner() is not None]
    assert not alive, f"alive after destroy: {alive[:3]}"
    deadline = time.monotonic() + 5
    while left := [t for t in threading.enumerate() if t not in threads and t.name.startswith(("shoal", "rank"))]:
        assert time.monotonic() < deadline, f"threads left: {left}"
        time.sleep(0.01)
