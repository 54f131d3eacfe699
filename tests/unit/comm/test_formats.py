"""Wire formats: the bytes that they send, what they lose, what they do with zeros and with what is not finite."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.comm.formats import FORMATS, Float8, Int4, Int8, OneBit, WireFormat, format_named
from shoal.errors import ConfigError

NUMELS = [1, 31, 32, 65, 256, 257, 1000, 40_000]
# By name: bytes of the codes of a block of 256 elements, and half of the largest step over the block's largest value.
STEPS = {"int8": (256, 0.5 / 127), "int4": (128, 0.5 / 7), "fp8": (256, 0.5 / 8)}
BLOCKED = [name for name in FORMATS if name not in ("bf16", "fp16")]


def decoded(wire: WireFormat, rows: torch.Tensor, error: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty_like(rows, dtype=torch.float32)
    wire.decode(wire.encode(rows, error), out)
    return out


def values_of(num_rows: int, numel: int) -> torch.Tensor:
    """With blocks of other magnitudes, and an outlier."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(num_rows, numel, generator=generator) * torch.linspace(0.1, 10.0, numel)
    values[-1, numel // 2] = 100.0
    return values


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("name", STEPS)
def test_a_value_is_off_by_half_of_a_step_of_its_block(name: str, numel: int) -> None:
    rows = values_of(3, numel)
    lost = (decoded(format_named(name), rows) - rows).abs()
    for start in range(0, numel, 256):
        block = slice(start, start + 256)
        most = rows[:, block].abs().amax(1, keepdim=True)
        assert (lost[:, block] <= most * STEPS[name][1] * 1.001).all()
    assert lost.max() > 0 or numel == 1


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_sent_is_what_the_table_says(name: str, numel: int) -> None:
    parts = format_named(name).encode(values_of(2, numel))
    nbytes = sum(part.nbytes for part in parts)
    padded = -(-numel // 32) * 32
    if name in ("bf16", "fp16"):
        assert nbytes == 2 * 2 * numel
    elif name == "1bit":
        assert nbytes == 2 * (padded // 8 + 4 * -(-numel // 512))
    else:
        bits = 4 if name.startswith("int4") else 8
        assert nbytes == 2 * (padded * bits // 8 + 4 * -(-numel // 256))
    assert all(len(part) == 2 for part in parts)


@pytest.mark.parametrize("numel", [65, 40_000])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_encoded_as_if_each_were_alone_and_from_any_dtype(name: str, numel: int) -> None:
    wire = format_named(name)
    rows = values_of(3, numel)
    together = decoded(wire, rows)
    assert torch.equal(together, torch.cat([decoded(wire, row[None]) for row in rows]))
    narrow = rows.bfloat16()
    assert torch.equal(decoded(wire, narrow), decoded(wire, narrow.float()))
    apart = torch.nn.functional.pad(rows, (0, 5))[:, :numel]
    assert torch.equal(decoded(wire, apart), together)


def test_a_rotation_spreads_an_outlier_and_loses_less() -> None:
    rows = torch.randn(1, 4096)
    rows[0, ::256] = 30.0
    plain, rotated = ((decoded(Int4(is_rotated=each), rows) - rows).norm() for each in (False, True))
    assert rotated < 0.6 * plain


def test_one_bit_keeps_the_sign_and_the_mean_magnitude() -> None:
    rows = torch.tensor([[3.0, -1.0, 2.0, -2.0] * 8, [0.0, 0.0, 0.0, 0.0] * 8])
    assert torch.equal(decoded(OneBit(block=32), rows), torch.tensor([[2.0, -2.0, 2.0, -2.0] * 8, [0.0] * 32]))


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("name", BLOCKED)
def test_zeros_stay_zeros_and_what_is_not_finite_is_marked(name: str, numel: int) -> None:
    wire = format_named(name, 64)
    assert not decoded(wire, torch.zeros(1, numel)).any()
    assert decoded(wire, torch.full((1, numel), 1e-42)).isfinite().all()
    for bad in (torch.inf, -torch.inf, torch.nan):
        rows = values_of(2, numel)
        rows[0, numel // 2] = bad
        out = decoded(wire, rows)
        block = slice(numel // 2 // 64 * 64, numel // 2 // 64 * 64 + 64)
        assert out[0, block].isnan().all()
        out[0, block] = 0.0
        assert out.isfinite().all()


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_the_largest_value_of_a_block_is_kept(name: str) -> None:
    rows = torch.linspace(-3.0, 5.0, 200)[None]
    assert torch.isclose(decoded(format_named(name), rows)[0, -1], rows[0, -1], rtol=1e-6)


@pytest.mark.parametrize("numel", [1, 65, 40_000])
@pytest.mark.parametrize("name", FORMATS)
def test_the_error_is_what_was_not_sent(name: str, numel: int) -> None:
    wire = format_named(name)
    rows, error = values_of(2, numel), 0.1 * values_of(2, numel).flip(1)
    wanted = rows + error
    sent = decoded(wire, rows, error)
    assert torch.equal(sent, decoded(wire, wanted))
    assert torch.equal(error, wanted - sent)


@pytest.mark.parametrize("name", FORMATS)
def test_with_an_error_the_mean_of_many_messages_is_the_value(name: str) -> None:
    wire, rows = format_named(name, 32), torch.randn(1, 1000)
    error, total = torch.zeros_like(rows), torch.zeros_like(rows)
    for _ in range(1000):
        total += decoded(wire, rows, error)
    assert ((total / 1000 - rows).abs().max() / rows.abs().max()) < 0.05
    rows[0, 7] = torch.inf
    decoded(wire, rows, error)
    assert error.isfinite().all()  # nothing of it is sent later


@pytest.mark.parametrize("name", FORMATS)
def test_a_dry_run_encodes_shapes(name: str) -> None:
    wire = format_named(name)
    with FakeTensorMode():
        rows = torch.empty(2, 1000)
        parts = wire.encode(rows, torch.empty_like(rows))
        wire.decode(parts, rows)
    assert [part.shape for part in parts] == [part.shape for part in wire.encode(torch.zeros(2, 1000))]


@pytest.mark.parametrize("block", [0, 48, -32])
@pytest.mark.parametrize("kind", [Int8, Int4, Float8, OneBit])
def test_a_block_that_a_rotation_does_not_divide_is_refused(kind: type, block: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 32"):
        kind(block=block)
