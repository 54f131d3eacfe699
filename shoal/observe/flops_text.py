"""The page that a profile is printed as: figures of the step, the heaviest modules by depth, the tree of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.observe.flops import ModuleCounts
from shoal.text import table

_SCALES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """A number with a prefix of its size, or with the one that is asked for.

    >>> number_to_string(866_076_672), number_to_string(0.004), number_to_string(1500, units="M", precision=4)
    ('866.08 M', '4 m', '0.0015 M')
    """
    if units is None:
        small = "" if num == 0 else "u"
        units = next((unit for unit, scale in _SCALES.items() if num >= scale), small)
    return f"{round(num / _SCALES.get(units, 1.0), precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """
    >>> macs_to_string(426_516_480)
    '426.52 MMACs'
    """
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """A rate: floating-point operations in a second.

    >>> flops_to_string(1.5e12)
    '1.5 TFLOPS'
    """
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """
    >>> bytes_to_string(2e9)
    '2 GB'
    """
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """
    >>> params_to_string(1_300_000_000), params_to_string(61_706), params_to_string(5)
    ('1.3 B', '61.71 K', '5')
    """
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """
    >>> duration_to_string(0.0123)
    '12.3 ms'
    """
    return f"{number_to_string(duration, units, precision)}s"


@dataclass(frozen=True)
class StepSeconds:
    """What a step took, measured around it; None: not measured.

    Args:
        forward, backward: of one micro-batch.
        num_micro: micro-batches of the step.
        backward_flops: counted while backward ran, recomputation included.
    """

    forward: float
    backward: float | None
    step: float
    num_micro: int
    backward_flops: int | None


def num_parameters(module: nn.Module) -> int:
    """Elements of all parameters, of the full ones where they are sharded."""
    return sum(parameter.numel() for parameter in module.parameters())


def summary_rows(
    counts: ModuleCounts,
    *,
    ranks: Mapping[str, int],
    micro_batch: int | None,
    num_data_parallel: int,
    seconds: StepSeconds | None,
    recompute_fwd_factor: float,
) -> list[tuple[str, str]]:
    """Labels and figures of a step."""
    total = counts.of(counts.model)
    rows = [(name, str(size)) for name, size in ranks.items()]
    if micro_batch is not None:
        rows.append(("batch size per GPU:", str(micro_batch)))
    rows += [
        ("params of model:", params_to_string(num_parameters(counts.model))),
        ("fwd MACs per GPU:", macs_to_string(total.macs)),
        ("fwd flops per GPU:", number_to_string(total.flops).strip()),
    ]
    forward = seconds.forward if seconds is not None else total.seconds
    rows.append(("fwd latency:", duration_to_string(forward)))
    rows.append(("fwd FLOPS per GPU = fwd flops per GPU / fwd latency:", _rate(total.flops, forward)))
    if seconds is None:
        return rows
    factor = 2 + recompute_fwd_factor
    both = (factor + 1) * total.flops
    if seconds.backward is not None:
        rows += [
            ("bwd latency:", duration_to_string(seconds.backward)),
            (
                f"bwd FLOPS per GPU = {factor:g} * fwd flops per GPU / bwd latency:",
                _rate(factor * total.flops, seconds.backward),
            ),
            (
                f"fwd+bwd FLOPS per GPU = {factor + 1:g} * fwd flops per GPU / (fwd+bwd latency):",
                _rate(both, forward + seconds.backward),
            ),
        ]
    if seconds.backward_flops is not None and total.macs:
        rows.append(("bwd MACs counted / fwd MACs:", f"{seconds.backward_flops / 2 / total.macs:.2f}"))
    rows.append(("step latency:", duration_to_string(seconds.step)))
    if seconds.backward is not None:
        iteration = seconds.num_micro * (forward + seconds.backward) + seconds.step
        times = f"{seconds.num_micro} * " if seconds.num_micro > 1 else ""
        rows += [
            ("iter latency:", duration_to_string(iteration)),
            (
                f"FLOPS per GPU = {times}{factor + 1:g} * fwd flops per GPU / iter latency:",
                _rate(seconds.num_micro * both, iteration),
            ),
        ]
        if micro_batch is not None and iteration > 0:
            samples = seconds.num_micro * micro_batch * num_data_parallel
            rows.append(("samples/second:", f"{samples / iteration:.2f}"))
    return rows


def _rate(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds) if seconds > 0 else "-"


def page(
    title: str,
    rows: Sequence[tuple[str, str]],
    notes: Sequence[str],
    counts: ModuleCounts,
    *,
    module_depth: int,
    top_modules: int,
    detailed: bool,
) -> str:
    """The whole page."""
    width = max(len(label) for label, _ in rows) + 2
    parts = [
        f"{f' {title} ':-^88}",
        "\n".join(f"{label:<{width}}{value}" for label, value in rows),
        *(f"note: {note}" for note in notes),
        top_table(counts, module_depth=module_depth, top_modules=top_modules),
    ]
    if detailed:
        parts.append(tree_table(counts, module_depth))
    return "\n\n".join([*parts, "-" * 88])


def top_table(counts: ModuleCounts, *, module_depth: int, top_modules: int) -> str:
    """Classes of modules at each depth, those first that have most parameters, multiply-adds or time.

    Args:
        module_depth: the last depth that is shown, 0 being the model; -1: all.
        top_modules: how many of each.
    """
    by_depth: dict[int, dict[str, list[float]]] = {}
    seen = set()
    for _, module, depth in _walk(counts.model, module_depth):
        if module in seen:
            continue
        seen.add(module)
        counted = counts.of(module)
        sums = by_depth.setdefault(depth, {}).setdefault(type(module).__name__, [0.0, 0.0, 0.0])
        for place, value in enumerate((num_parameters(module), counted.macs, counted.seconds)):
            sums[place] += value
    rows = []
    shown: list[Callable[[float], str]] = [params_to_string, macs_to_string, duration_to_string]
    for depth, classes in by_depth.items():
        cells = []
        for place, text in enumerate(shown):
            first = sorted(classes.items(), key=lambda entry: -entry[1][place])[: max(1, top_modules)]
            cells.append(", ".join(f"{name} {text(sums[place])}" for name, sums in first))
        rows.append([depth, *cells])
    headers = ["depth", "most parameters", "most MACs", "longest forward"]
    return f"Top {top_modules} modules at each depth:\n{table(rows, headers)}"


def tree_table(counts: ModuleCounts, module_depth: int = -1) -> str:
    """A line for each module: its share of parameters, multiply-adds and time, and its rate."""
    total, num_all = counts.of(counts.model), num_parameters(counts.model)
    rows = []
    for name, module, depth in _walk(counts.model, module_depth):
        counted, numel = counts.of(module), num_parameters(module)
        rows.append(
            [
                "  " * depth + name,
                type(module).__name__,
                f"{params_to_string(numel)} = {_percent(numel, num_all)}",
                f"{macs_to_string(counted.macs)} = {_percent(counted.macs, total.macs)}",
                f"{duration_to_string(counted.seconds)} = {_percent(counted.seconds, total.seconds)}",
                _rate(counted.flops, counted.seconds),
            ]
        )
    return "Modules:\n" + table(rows, ["module", "class", "params", "MACs", "fwd latency", "fwd FLOPS"])


def _walk(model: nn.Module, module_depth: int) -> Iterator[tuple[str, nn.Module, int]]:
    """Names, modules and depths, a module before those inside it; one in two places comes twice."""

    def below(name: str, module: nn.Module, depth: int) -> Iterator[tuple[str, nn.Module, int]]:
        yield name, module, depth
        if depth != module_depth:
            for child_name, child in module._modules.items():
                if child is not None:
                    yield from below(child_name, child, depth + 1)

    yield from below("model", model, 0)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.2f} %"
