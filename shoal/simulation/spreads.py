"""How operators change what the ranks along one axis have: rules over four kinds of tensors.

    kind         along the axis                                       examples (tensor parallel)
    replicated   equal values on all ranks                            a residual stream, a norm's weight
    sharded d    each rank has a part, along dim d                    the output of a column linear (its last dim)
    partial      each rank has a summand: the sum is the value        the output of a row linear before its sum
    varies       other values on each rank, nothing more is known     tokens that were sent to experts
    zero         zeros, or memory without values: any of the above    a new gradient buffer

A sharded dim is an int here. A matrix product over a sharded dim is partial, as is a sum over one. A partial tensor may
only pass linear operators, together with replicated ones: everything else is a ``Fault``, because the sum of the
results is not the result of the sum. What an operator without a rule makes of tensors that are not replicated varies.

Vocabulary: DTensor's placements, and the types of meta-pytorch/spmd_types (which derives the backward pass from the
forward one; here both are followed operator by operator, so that autograd functions written by hand are checked too).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

from shoal.simulation.modes import accessed, effects_of, tensors_of

REPLICATED, PARTIAL, VARIES, ZERO = "replicated", "partial", "varies", "zero"
Kind: TypeAlias = str | int  # an int: sharded along this dim


class Fault(Exception):
    """What an operator must not do with tensors of these kinds. ``is_quotient``: it divides by a summand."""

    def __init__(self, what: str, *, is_quotient: bool = False) -> None:
        super().__init__(what)
        self.is_quotient = is_quotient


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator. ``name``: without namespace, overload and the underscore of in-place ones."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    outs: list[torch.Tensor]
    written: list[torch.Tensor]
    is_pointwise: bool

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """A positional or named argument."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)


def call_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OperatorCall:
    """The call, and its tensors in the order of the arguments."""
    name, is_pointwise = _name_of(operator)
    written = accessed(effects_of(operator), args, kwargs)[1]
    outs = list(tensors_of(result)) or written
    results = {argument for _, argument, is_written in effects_of(operator).arguments if is_written}
    read = [args, *(value for key, value in kwargs.items() if key not in results)]
    return OperatorCall(name, args, kwargs, list(tensors_of(read)), outs, written, is_pointwise)


@cache
def _name_of(operator: Any) -> tuple[str, bool]:
    name = operator._schema.name.rpartition("::")[2]
    is_in_place = name.endswith("_") and not name.startswith("__")
    return name[:-1] if is_in_place else name, torch.Tag.pointwise in operator.tags


def kinds_of_results(call: OperatorCall, kinds: Sequence[Kind]) -> list[Kind]:
    """Of each result, its kind along an axis along which the tensors of the call have ``kinds``. Raises: Fault."""
    if call.name == "lift_fresh":  # a number of the host
        return [REPLICATED]
    if call.name in _ZEROS or (call.name in ("full", "fill", "new_full") and call.args[-1] == 0):
        return [ZERO] * len(call.outs)
    if all(kind is ZERO for kind in kinds) and kinds:
        return [ZERO if call.name.removeprefix("_foreach_") in _KEEPS_ZEROS else REPLICATED] * len(call.outs)
    if all(kind in (REPLICATED, ZERO) for kind in kinds):
        return [REPLICATED] * len(call.outs)
    if call.name.startswith("_foreach_"):
        return _foreach(call, kinds)
    rule = _RULES.get(call.name)
    if rule is None:
        rule = _backward if "backward" in call.name else _pointwise if call.is_pointwise else _unknown
    found = rule(call, kinds)
    return found if isinstance(found, list) else [found] * len(call.outs)


def factor_of_results(call: OperatorCall, factors: Sequence[float | None]) -> float | None:
    """What copies, sums and multiples have of the factors of the call's tensors (0: zeros); None: unknown."""
    name = call.name.removeprefix("_foreach_")
    if "copy" in name and call.written:
        factors = factors[len(call.written) :]
    factor, number = equal_factor(factors), call.argument(1, "other", call.kwargs.get("scalar"))
    if factor is None:
        return None
    if name in ("mul", "div"):
        is_number = isinstance(number, int | float)
        return (factor * number if name == "mul" else factor / number) if is_number else None
    is_sum = name == "add" and call.argument(2, "alpha", 1) == 1 and not isinstance(number, int | float)
    return factor if is_sum or _RULES.get(name) in _KEEPS_FACTOR else None


def equal_factor(factors: Sequence[float | None]) -> float | None:
    """The one of tensors that are added up, or parts of one memory."""
    known = {factor for factor in factors if factor != 0} or {0.0}
    return known.pop() if len(known) == 1 else None


Rule: TypeAlias = Callable[[OperatorCall, Sequence[Kind]], Kind | list[Kind]]


# Kinds of several tensors, whose sharded dims are those of the result.


def _added(kinds: Sequence[Kind], name: str = "add") -> Kind:
    some = [kind for kind in kinds if kind is not ZERO]
    if VARIES in some:
        return VARIES
    if PARTIAL in some:
        if REPLICATED in some:
            raise Fault(
                f"{name} of a partial and a replicated tensor: the sum over the ranks counts the latter on each"
            )
        return PARTIAL if set(some) == {PARTIAL} else VARIES
    return _joined(some)


def _multiplied(kinds: Sequence[Kind], name: str = "mul") -> Kind:
    if ZERO in kinds:
        return ZERO
    if kinds.count(PARTIAL) > 1:
        raise Fault(f"{name} of two partial tensors: the product of the sums is not the sum of the products")
    if PARTIAL in kinds and any(isinstance(kind, int) for kind in kinds):
        raise Fault(f"{name} of a partial and a sharded tensor: each rank's part needs the sum over the ranks")
    if VARIES in kinds:
        return VARIES
    return PARTIAL if PARTIAL in kinds else _joined(kinds)


def _joined(kinds: Sequence[Kind]) -> Kind:
    """Of tensors that are not partial. What is replicated next to a part was cut to its size by the rank."""
    dims = {kind for kind in kinds if isinstance(kind, int)}
    return VARIES if VARIES in kinds or len(dims) > 1 else next(iter(dims), REPLICATED)


def _is_linear(name: str, kinds: Sequence[Kind]) -> None:
    if PARTIAL in kinds:
        raise Fault(f"{name} of a partial tensor: it is not linear, and the sum over the ranks comes later")


# Rules


def _unknown(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    return VARIES


def _linear(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    return _fitting(kinds[0], call.tensors[0], call.outs[0])


def _fitting(kind: Kind, source: torch.Tensor, out: torch.Tensor) -> Kind:
    """Of a result with the dims of ``source``, of which one may be cut."""
    if not isinstance(kind, int):
        return kind
    return kind if source.dim() == out.dim() and source.shape[kind] <= out.shape[kind] else VARIES


def _view(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    kind, old, new = kinds[0], call.tensors[0].shape, call.outs[0].shape
    if not isinstance(kind, int) or old == new:
        return kind
    one = other = 0
    while one < len(old) and other < len(new):  # runs of dims with the same number of elements
        begins, sizes = (one, other), [old[one], new[other]]
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1] and one + 1 < len(old):
                one += 1
                sizes[0] *= old[one]
            elif sizes[0] > sizes[1] and other + 1 < len(new):
                other += 1
                sizes[1] *= new[other]
            else:
                return VARIES
        if begins[0] <= kind <= one:
            is_first = all(old[dim] == 1 for dim in range(begins[0], kind))
            return begins[1] if is_first else VARIES
        one, other = one + 1, other + 1
    return VARIES


def _transpose(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    kind, ndim = kinds[0], call.tensors[0].dim()
    if not isinstance(kind, int):
        return kind
    dims = list(range(ndim))
    if call.name == "permute":
        dims = [dim % ndim for dim in call.argument(1, "dims")]
    elif ndim > 1:
        one, other = (0, 1) if call.name == "t" else (call.args[1] % ndim, call.args[2] % ndim)
        dims[one], dims[other] = other, one
    return dims.index(kind)


def _expand(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    kind = kinds[0]
    return kind + call.outs[0].dim() - call.tensors[0].dim() if isinstance(kind, int) else kind


def _unsqueeze(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    kind, dim = kinds[0], call.argument(1, "dim") % call.outs[0].dim()
    return kind + (dim <= kind) if isinstance(kind, int) else kind


def _select(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    kind, dim = kinds[0], call.argument(1, "dim", 0) % call.tensors[0].dim()
    if not isinstance(kind, int):
        return kind
    return VARIES if kind == dim else kind - (dim < kind)


def _select_backward(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    kind, dim = kinds[0], call.args[2] % call.outs[0].dim()
    return kind + (dim <= kind) if isinstance(kind, int) else kind


def _cat(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    out, dim = call.outs[0], call.argument(1, "dim", 0)
    dim = dim % out.dim()
    if PARTIAL in kinds and any(kind not in (PARTIAL, ZERO) for kind in kinds):
        return VARIES
    if call.name == "stack":
        kinds = [kind + (dim <= kind) if isinstance(kind, int) else kind for kind in kinds]
    found = PARTIAL if PARTIAL in kinds else _joined([kind for kind in kinds if kind is not ZERO])
    return VARIES if call.name == "cat" and isinstance(found, int) and found == dim else found


def _aligned(call: OperatorCall, kinds: Sequence[Kind]) -> list[Kind]:
    """With sharded dims of the result, to which the tensors are broadcast."""
    ndim = call.outs[0].dim() if call.outs else 0
    return [
        kind + ndim - tensor.dim() if isinstance(kind, int) else kind
        for kind, tensor in zip(kinds, call.tensors, strict=True)
    ]


def _pointwise(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    if call.outs and call.outs[0].is_floating_point():
        _is_linear(call.name, kinds)
    return VARIES if PARTIAL in kinds else _joined(_aligned(call, kinds))


def _add(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    numbers = [arg for arg in call.args[:2] if isinstance(arg, int | float) and arg]
    return _added([*_aligned(call, kinds), *([REPLICATED] if numbers else [])], call.name)


def _mul(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    if call.name == "div" and len(kinds) > 1 and kinds[1] is PARTIAL:
        raise Fault("div by a partial tensor: the sum over the ranks comes later", is_quotient=True)
    return _multiplied(_aligned(call, kinds), call.name)


def _copy(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    return _aligned(call, kinds)[1]


def _where(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    """Of ``where`` and ``masked_fill``: a choice between values by a mask. A number that is not zero is replicated."""
    mask = 0 if call.name == "where" else 1
    aligned = _aligned(call, kinds)
    chosen = [kind for place, kind in enumerate(aligned) if place != mask]
    if PARTIAL in aligned and aligned[mask] is not REPLICATED:
        return VARIES
    return _joined([_added(chosen, call.name), aligned[mask]]) if PARTIAL not in chosen else _added(chosen, call.name)


def _product(a: str, b: str, out: str) -> Rule:
    """Of matrix products, by the letters of their dims: two operands and the result; before them, a summand."""

    def rule(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
        *summand, one, other = kinds[: len(call.tensors)]
        letters = []
        for kind, names in ((one, a), (other, b)):
            letters.append(names[kind] if isinstance(kind, int) else None)
        is_summed = any(letter is not None and letter not in out for letter in letters)
        if PARTIAL in (one, other) or VARIES in (one, other) or ZERO in (one, other):
            found = _multiplied([one, other], call.name)
        elif is_summed:
            is_clear = all(letter is None or letter not in out for letter in letters)
            found = PARTIAL if is_clear else VARIES
        else:
            found = _joined([out.index(letter) for letter in letters if letter is not None])
        if not summand:
            return found
        bias, tensor = summand[0], call.tensors[0]
        return _added([bias + call.outs[0].dim() - tensor.dim() if isinstance(bias, int) else bias, found], call.name)

    return rule


def _reduced(call: OperatorCall) -> set[int]:
    """The dims over which a reduction runs."""
    ndim = call.tensors[0].dim()
    dims = call.argument(1, "dim")
    if dims is None or not isinstance(dims, int | list | tuple) or dims in ([], ()):
        return set(range(ndim))
    return {dim % ndim for dim in ([dims] if isinstance(dims, int) else dims)} if ndim else set()


def _reduce(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    kind, is_linear = kinds[0], call.name in ("sum", "mean", "nansum")
    if not is_linear and call.outs[0].is_floating_point():
        _is_linear(call.name, kinds)
    if not isinstance(kind, int):
        return kind if is_linear or kind is not PARTIAL else VARIES
    dims = _reduced(call)
    if kind in dims:
        return PARTIAL if is_linear else VARIES
    return kind if call.outs[0].dim() == call.tensors[0].dim() else kind - sum(dim < kind for dim in dims)


def _normalized(call: OperatorCall, kinds: Sequence[Kind]) -> Kind | list[Kind]:
    """Of softmax, norms and attention: nothing of a dim that is not normalized depends on its other places."""
    _is_linear(call.name, kinds)
    found = _joined(kinds)
    if not isinstance(found, int):
        return found
    source = call.tensors[0]
    if "softmax" in call.name:
        own = {call.argument(1, "dim") % source.dim()}
    elif "norm" in call.name:
        shape = call.argument(1, "normalized_shape")
        own = set(range(source.dim() - (len(shape) if isinstance(shape, list | tuple) else 1), source.dim()))
    else:
        own = {2, 3}
    return [_of_dim(found, source, out) if found not in own else VARIES for out in call.outs]


def _of_dim(dim: int, source: torch.Tensor, out: torch.Tensor) -> Kind:
    return dim if dim < out.dim() and out.shape[dim] == source.shape[dim] else VARIES


def _backward(call: OperatorCall, kinds: Sequence[Kind]) -> Kind | list[Kind]:
    """Of operators of a backward pass: linear in the gradient, which comes first. Other results are sums over dims."""
    gradient, rest = kinds[0], [kind for kind in kinds[1:] if kind is not ZERO]
    if gradient is PARTIAL:
        if any(isinstance(kind, int) for kind in rest):
            raise Fault(
                f"{call.name} of a partial gradient and a sharded tensor: a sum over the ranks is missing before"
            )
        return PARTIAL if all(kind is REPLICATED for kind in rest) else VARIES
    if PARTIAL in rest:
        return VARIES
    found = _joined([gradient, *rest])
    if not isinstance(found, int):
        return found
    source = call.tensors[0]
    is_norm = "norm" in call.name and found < source.dim() - 1
    return [PARTIAL if is_norm and place else _of_dim(found, source, out) for place, out in enumerate(call.outs)]


def _embedding(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    weight, index = kinds[0], kinds[1]
    if weight is PARTIAL and index is REPLICATED:
        return PARTIAL
    if weight is REPLICATED or weight is ZERO:
        return index
    return call.outs[0].dim() - 1 if weight == 1 and index is REPLICATED else VARIES


def _embedding_backward(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    gradient, index = kinds[0], kinds[1]
    if gradient is PARTIAL:
        return PARTIAL if index is REPLICATED else VARIES
    found = _joined([gradient, index])
    if isinstance(found, int):
        return PARTIAL if found < call.tensors[0].dim() - 1 else 1
    return found


def _indexed(call: OperatorCall, kinds: Sequence[Kind]) -> Kind:
    """Of what reads or writes places of its first tensor."""
    rest = [kind for kind in kinds[1:] if kind is not ZERO]
    if kinds[0] in (PARTIAL, ZERO) and all(kind in (PARTIAL, REPLICATED) for kind in rest):
        return PARTIAL if kinds[0] is PARTIAL or PARTIAL in rest else REPLICATED
    if isinstance(kinds[0], int) and all(kind in (REPLICATED, kinds[0]) for kind in rest):
        return _fitting(kinds[0], call.tensors[0], call.outs[0])
    return VARIES


def _foreach(call: OperatorCall, kinds: Sequence[Kind]) -> list[Kind]:
    """Of lists: each with the one in its place."""
    own = len(list(tensors_of(call.args[0])))
    given = [kinds[place::own] for place in range(own)]
    if "copy" in call.name:
        return [each[-1] if not isinstance(each[-1], int) else VARIES for each in given]
    merge = _added if "add" in call.name or "sub" in call.name else _multiplied
    return [merge(each, call.name) for each in given]


def _named(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_MAKES_ZEROS = (
    "zeros zeros_like zero new_zeros empty empty_like new_empty empty_strided new_empty_strided empty_permuted"
)
_VIEWS = "view _unsafe_view reshape _reshape_alias squeeze flatten unflatten view_as"
_LINEAR = (
    "_to_copy clone detach alias neg contiguous slice narrow split split_with_sizes chunk unsafe_split"
    " unsafe_chunk constant_pad_nd slice_backward roll flip native_dropout resize as_strided"
)
_RULES: dict[str, Rule] = {
    **_named(_VIEWS, _view),
    **_named(_LINEAR, _linear),
    **_named("t transpose permute", _transpose),
    **_named("select unbind", _select),
    **_named("cat stack", _cat),
    **_named("add sub rsub lerp", _add),
    **_named("mul div", _mul),
    **_named("where masked_fill", _where),
    "unsqueeze": _unsqueeze,
    "select_backward": _select_backward,
    "expand": _expand,
    "copy": _copy,
    **_named("mm addmm", _product("mk", "kn", "mn")),
    **_named("bmm baddbmm", _product("bmk", "bkn", "bmn")),
    "mv": _product("mk", "k", "m"),
    "dot": _product("k", "k", ""),
    **_named("sum mean nansum amax amin logsumexp prod all any linalg_vector_norm norm var", _reduce),
    **_named("_softmax _log_softmax native_layer_norm _fused_rms_norm", _normalized),
    **_named(
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention"
        " _scaled_dot_product_efficient_attention _scaled_dot_product_attention_math",
        _normalized,
    ),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    **_named("gather scatter scatter_add index index_select index_put index_add index_copy slice_scatter", _indexed),
}
_KEEPS_FACTOR = (_view, _linear, _transpose, _select, _cat, _unsqueeze, _copy)
_ZEROS = frozenset(_MAKES_ZEROS.split())
_KEEPS_ZEROS = frozenset(
    f"{_VIEWS} {_LINEAR} copy mul add sum t transpose permute select unbind expand unsqueeze".split()
)
