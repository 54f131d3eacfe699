"""Products of experts' rows in 8 bits, with interpreted kernels: what a product for each expert computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.parallel.expert import grouped
from shoal.parallel.expert.grouped import grouped_linear
from shoal.parallel.expert.route import RowCounts
from shoal.parallel.low_precision import groups
from shoal.parallel.low_precision.formats import ScaledFloat8
from shoal.parallel.low_precision.groups import Aligned, take_groups
from shoal.parallel.low_precision.products import LowPrecisionProducts
from shoal.parallel.low_precision.recipes import RECIPES
from shoal.parallel.products import LayerProducts

COUNTS = [[21, 0, 40, 3], [0, 0, 0, 64], [16, 32, 0, 1], [5, 0, 0, 0], [1, 2, 3]]
BY_GROUPS = ("rowwise", "rowwise_with_gw_hp")
CPU = torch.device("cpu")


def as_on_a_gpu(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, *, offs: Tensor, out_dtype: Any) -> Any:
    """torch's operator in fp32, with the checks of its sources."""
    assert left.dtype == right.dtype == torch.float8_e4m3fn and of_left.dtype == of_right.dtype == torch.float32
    assert offs.dtype is torch.int32 and out_dtype is torch.bfloat16
    assert left.is_contiguous() and right.transpose(-1, -2).is_contiguous() and of_left.stride(-1) == 1
    assert left.shape[1] % 16 == right.shape[-1] % 16 == right.shape[-2] % 16 == 0
    starts = [0, *offs.tolist()[:-1]]
    parts = list(zip(starts, offs.tolist(), strict=True))
    if right.dim() == 3:
        assert left.shape[1] == right.shape[1] and of_left.shape == left.shape[:1]
        assert of_right.shape == (right.shape[0], right.shape[2]) and of_right.is_contiguous()
        out = left.new_full((len(left), right.shape[2]), float("nan"), dtype=torch.float32)
        for number, (start, end) in enumerate(parts):
            product = left[start:end].float() @ right[number].float()
            out[start:end] = product * of_left[start:end, None] * of_right[number]
        return out.to(out_dtype)
    assert of_left.shape == (len(offs) * len(left),) and of_right.shape == (len(offs) * right.shape[1],)
    assert left.shape[1] == right.shape[0]
    out = left.new_full((len(offs), len(left), right.shape[1]), float("nan"), dtype=torch.float32)
    for number, (start, end) in enumerate(parts):
        assert start % 16 == 0 and end % 16 == 0 and start < end <= left.shape[1]
        product = left[:, start:end].float() @ right[start:end].float()
        out[number] = product * of_left.view(len(offs), -1)[number, :, None] * of_right.view(len(offs), -1)[number]
    return out.to(out_dtype)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device whose torch has products of groups; their names, in order."""
    ran: list[str] = []

    def counted(*args: Any, **keys: Any) -> Any:
        ran.append("weights" if args[1].dim() == 2 else "rows")
        return as_on_a_gpu(*args, **keys)

    monkeypatch.setattr(grouped, "capability", lambda tensor: (9, 0))
    monkeypatch.setattr(groups, "_scaled_grouped_mm", counted)
    return ran


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_groups_begin_at_multiples_of_16(counts: list[int]) -> None:
    aligned = Aligned.of(ends_of(counts), sum(counts))
    source, group_of, ends = [], [], []
    row = 0
    for number, count in enumerate(counts):
        length = max(16, -(-count // 16) * 16)
        source += [*range(row, row + count), *[-1] * (length - count)]
        group_of += [number] * (length // 16)
        ends.append(len(source))
        row += count
    assert aligned.ends.tolist() == ends
    assert aligned.source.tolist() == source + [-1] * (len(aligned.source) - len(source))
    assert aligned.group_of.tolist() == group_of + [len(counts)] * (len(aligned.group_of) - len(group_of))
    assert len(aligned.source) == 16 * len(aligned.group_of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_codes_of_groups_have_the_bits_of_operators(counts: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(sum(counts), 70, generator=generator) * 10
    rows = (torch.randn(sum(counts), 70, generator=generator) * sizes.exp2()).to(dtype)
    rows[0, 3:5] = torch.tensor([448.0, -1.0])
    aligned = Aligned.of(ends_of(counts), len(rows))
    codes, scales = groups._encode(rows, aligned)
    form = ScaledFloat8(torch.float8_e4m3fn, (1, None))
    begin = 0
    for number, (part, end) in enumerate(zip(rows.split(counts), aligned.ends.tolist(), strict=True)):
        own = codes[:, begin:end].float()
        assert not own[:, len(part) :].any()
        if len(part):
            expected, of_expected = form.encode_by_operators(part.t())
            assert torch.equal(own[:, : len(part)], expected.float())
            assert torch.equal(scales.view(len(counts), -1)[number], of_expected)
        begin = end
    assert not codes[:, begin:].float().any() and scales.isfinite().all()


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")
def test_what_is_not_finite_makes_the_scale_of_its_group_nan() -> None:
    rows = torch.ones(40, 16)
    rows[25, 3] = float("inf")
    _, scales = groups._encode(rows, Aligned.of(ends_of([20, 20]), 40))
    assert scales.isnan().nonzero().flatten().tolist() == [16 + 3]


@pytest.mark.parametrize("block", [(1, None), (None, None)], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_stack_is_encoded_as_each_matrix(is_transposed: bool, block: tuple[int | None, int | None]) -> None:
    stack = torch.randn(3, 70, 130) * torch.randn(3, 70, 1).mul(9).exp2()
    stack = stack.transpose(1, 2) if is_transposed else stack
    form = ScaledFloat8(torch.float8_e4m3fn, block)
    found, scales = form.encode(stack)
    expected, of_expected = form.encode_by_operators(stack)
    assert found.is_contiguous() and torch.equal(found.float(), expected.float())
    assert torch.equal(scales, of_expected)
    assert scales.shape == ((3, stack.shape[1]) if block[0] == 1 else (3,))


@pytest.mark.parametrize(
    ("counts", "is_transposed"), [(COUNTS[0], False), (COUNTS[1], True), (COUNTS[4], True)], ids=str
)
@pytest.mark.parametrize("name", BY_GROUPS)
def test_experts_have_the_numbers_of_a_product_for_each(
    name: str, counts: list[int], is_transposed: bool, hopper: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, weight = torch.randn(sum(counts), 48), torch.randn(len(counts), *((32, 48) if is_transposed else (48, 32)))
    bias = torch.randn(len(counts), 32)
    leaves = [each.bfloat16().requires_grad_() for each in (rows, weight, bias)]

    def results(*, by_groups: bool) -> list[Tensor]:
        products = LowPrecisionProducts(RECIPES[name])
        if by_groups:
            assert take_groups(products, CPU) is None
        layer, of_rows = LayerProducts(products), RowCounts(counts)
        layer.is_on, of_rows.products = True, layer
        used = leaves[1].transpose(1, 2) if is_transposed else leaves[1]
        out = grouped_linear(leaves[0], used, of_rows, leaves[2])
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    expected = results(by_groups=False)
    assert not hopper
    found = results(by_groups=True)
    of_sample = ["rows", "rows", *(["weights"] if name == "rowwise" else [])]
    assert hopper == of_sample * 2
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert (one.float() - other.float()).abs().max() <= other.float().abs().max() * 2.0**-7
    assert found[2].stride() == leaves[1].stride()


@pytest.mark.usefixtures("hopper")
def test_a_product_of_groups_with_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = groups._scaled_grouped_mm
    products = LowPrecisionProducts(RECIPES["rowwise"])

    def reversed_(left: Tensor, other: Tensor, of_left: Tensor, of_right: Tensor, **keys: Any) -> Tensor:
        result: Tensor = right(left, other, of_left.flip(0), of_right, **keys)
        return result

    def unset(left: Tensor, other: Tensor, *scales: Tensor, value: float, **keys: Any) -> Tensor:
        """Where a group is short."""
        result: Tensor = right(left, other, *scales, **keys)
        if other.dim() == 2:
            result[keys["offs"].diff(prepend=keys["offs"].new_zeros(1)) <= 16] = value
        return result

    for wrong in (reversed_, partial(unset, value=1000.0), partial(unset, value=float("nan"))):
        monkeypatch.setattr(groups, "_scaled_grouped_mm", wrong)
        assert "off by" in str(take_groups(products, CPU)) and products.groups is None

    def refuse(*args: object, **keys: object) -> None:
        raise RuntimeError("not on this GPU\nand more")

    monkeypatch.setattr(groups, "_scaled_grouped_mm", refuse)
    assert take_groups(products, CPU) == "torch's product of groups says: not on this GPU"


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in BY_GROUPS])
def test_other_recipes_have_a_product_for_each_expert(name: str) -> None:
    assert "takes e4m3 with scales of rows" in str(take_groups(LowPrecisionProducts(RECIPES[name]), CPU))
