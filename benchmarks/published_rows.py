"""Published runs as models, configurations and machines.

What a study's code fuses or leaves out is said here, for the study as a whole:

    MosaicML llm-foundry   FSDP; flash attention, no biases; eager PyTorch, a foreach AdamW; reduces each micro-batch
    vTrain                 Megatron-DeepSpeed: biases, scores in memory (its softmax kernel scales and masks), dropout,
                           fp16; operator by operator (it fuses some pointwise operators and launches the others)
    Narayanan, Korthikanti Megatron of 2021 and 2022: the same, with pointwise operators and norms fused
    torchtitan, torchao    FSDP2 with torch.compile: fused
    DeepSpeed autotuning   Transformers' GPT-2, eager: scores, scaling, mask and GELU operator by operator; fp16, V100
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.published_models import Shape


@dataclass(frozen=True)
class Inputs:
    """All that a tape depends on."""

    shape: Shape
    tp: int
    stages_run: int
    dp: int
    stage: int
    micro_batch: int
    micro_run: int
    recompute: str
    dtype: str
    is_sequence_parallel: bool
    ranks_per_node: int
    is_fused: bool


@dataclass(frozen=True)
class Run:
    """One training run. ``num_micro``: micro-batches of a step on a rank."""

    shape: Shape
    machine: str
    tp: int
    pp: int
    dp: int
    stage: int
    micro_batch: int
    num_micro: int
    recompute: str = "none"
    dtype: str = "bfloat16"
    virtual_stages: int = 1
    is_sequence_parallel: bool = False
    is_fused: bool = False

    @property
    def stages_run(self) -> int:
        return min(self.pp, 2)

    @property
    def micro_run(self) -> int:
        """Micro-batches that are dry-run."""
        return 4 if self.pp > 1 else min(self.num_micro, 2)

    @property
    def inputs(self) -> Inputs:
        return Inputs(
            replace(self.shape, layers=0), self.tp, self.stages_run, self.dp, self.stage, self.micro_batch,
            self.micro_run, self.recompute, self.dtype, self.is_sequence_parallel,
            16 if "v100" in self.machine else 8, self.is_fused,
        )  # fmt: skip

    def with_layers(self, layers: int) -> Shape:
        return replace(self.shape, layers=layers)


@dataclass(frozen=True)
class Measured:
    """What a row says: ``seconds`` of a step, or ``memory``: the most bytes that were allocated, or reserved."""

    study: str
    name: str
    run: Run
    seconds: float = 0.0
    memory: float = 0.0


LLAMA = {  # kv heads, feed-forward, vocabulary; model_dims.csv
    (32, 4096): (8, 14336, 128256),
    (80, 8192): (8, 28672, 128256),
    (126, 16384): (8, 53248, 128256),
    (16, 2048): (8, 8192, 128256),
}


def _machine(gpu: str) -> str | None:
    for start, name in (
        ("A100-40", "a100-40g"), ("A100", "a100-80g"), ("H100", "h100"), ("V100 (DGX-2, 16", "v100-32g"),
        ("MI300X", "mi300x"), ("B200", "b200"), ("H200", "h200"), ("GB200", "gb200"),
    ):  # fmt: skip
        if gpu.startswith(start):
            return name
    return None


def _gpt(row: dict[str, str], **given: object) -> Shape:
    hidden = int(row["hidden"])
    shape = Shape(
        "gpt", int(row["layers"]), hidden, int(row["heads"]), int(row["heads"]), 4 * hidden,
        int(row["vocab"] or 51200), int(row["seq_len"] or 1024), True,
    )  # fmt: skip
    return replace(shape, **given)  # type: ignore[arg-type]


def _number(row: dict[str, str], key: str, default: int = 1) -> int:
    return int(row[key] or default)


def _flops_96(shape: Shape, batch: int) -> float:
    """Narayanan et al., SC21, section 5.1: with recomputation."""
    s, layers, h = shape.sequence, shape.layers, shape.hidden
    return 96 * batch * s * layers * h * h * (1 + s / (6 * h) + shape.vocab / (16 * layers * h))


def _mosaic(row: dict[str, str]) -> Measured | str:
    if row["metric"] != "tokens_per_s_per_gpu":
        return ""
    if row["precision"] == "amp_fp8":
        return "MosaicML: FP8 by Transformer Engine"
    hidden, dp = int(row["hidden"]), int(row["dp"])
    shape = _gpt(row, family="mpt", ffn=4 * hidden)
    num = int(row["global_batch"]) // (dp * int(row["micro_batch"]))
    machine = _machine(row["gpu"]) or ""
    run = Run(
        shape, machine, 1, 1, dp, 3, int(row["micro_batch"]), num,
        row["activation_recompute"], "bfloat16",
    )  # fmt: skip
    tokens = int(row["global_batch"]) * shape.sequence / dp
    name = f"{row['model']} s{shape.sequence} x{dp} b{run.micro_batch} m{num} {run.recompute} {machine}"
    return Measured(f"MosaicML {row['gpu'][:4]}", name, run, tokens / float(row["value"]))


def _vtrain(row: dict[str, str]) -> Measured | str:
    shape = _gpt(row, attention="written", dropout=0.1)
    tp, pp, dp, micro = (_number(row, key) for key in ("tp", "pp", "dp", "micro_batch"))
    num = int(row["global_batch"]) // (dp * micro)
    run = Run(shape, "a100-80g", tp, pp, dp, 0, micro, num, "full", "float16")
    name = f"h{shape.hidden} l{shape.layers} tp{tp} pp{pp} dp{dp} b{micro} m{num}"
    return Measured("vTrain", name, run, float(row["value"]) / 1e3)


def _megatron(row: dict[str, str]) -> Measured | str:
    source = row["source"]
    if not row["layers"]:
        return f"{source}: no shape in the row"
    tp, pp, dp = (_number(row, key) for key in ("tp", "pp", "dp"))
    shape = _gpt(row, attention="written", dropout=0.1)
    batch, micro = _number(row, "global_batch"), _number(row, "micro_batch")
    if row["metric"] == "hw_tflops_per_gpu" and source.startswith("Narayanan SC21 Table"):
        seconds = _flops_96(shape, batch) / (float(row["value"]) * 1e12 * int(row["n_gpus"]))
    elif row["metric"] == "iter_time" and source.startswith("Korthikanti") and row["micro_batch"]:
        seconds = float(row["value"])
    else:
        return ""
    stage = int(row["zero_stage"] or 0)
    if dp == 1:
        stage = 0
    is_selective = row["activation_recompute"] == "selective"
    virtual = 3 if "Korthikanti" in source and pp in (8, 35) else 2 if source.endswith("Table 1") and pp > 1 else 1
    run = Run(
        shape, "a100-80g", tp, pp, dp, stage, micro, batch // (dp * micro),
        "attention" if is_selective else "full", "float16", virtual, is_selective, True,
    )  # fmt: skip
    name = f"{row['model']} tp{tp} pp{pp} dp{dp} b{micro} m{run.num_micro} zero{stage} {row['activation_recompute']}"
    return Measured(source.removesuffix(" Table 1").removesuffix(" Table 2"), name, run, seconds)


def _megatron_core(row: dict[str, str]) -> Measured | str:
    if row["metric"] != "model_tflops_per_gpu":
        return ""
    return "Megatron-Core README: the micro-batch is not stated"


_NAMED = {"llama3-8B": ("32", "4096", "32"), "llama3-1B": ("16", "2048", "32")}  # layers, hidden size, heads
_MEMORY = {"GB": 2.0**30, "GiB": 2.0**30}  # torchtitan prints GiB, whatever it calls them


def _llama(row: dict[str, str]) -> Measured | str:
    is_memory = row["metric"].startswith("mem_peak") and row["unit"] in _MEMORY
    if row["metric"] not in ("tokens_per_s_per_gpu", "step_time") and not is_memory:
        return ""
    if row["model"] in _NAMED:
        row = {**row, **dict(zip(("layers", "hidden", "heads"), _NAMED[row["model"]], strict=True))}
    what = row["source"].split(" 2")[0] if row["source"].startswith("torchtitan") else row["source"]
    if "torchtitan 2024 A100" in row["source"]:
        dims = (8, 28672, 32000)
    else:
        if not row["layers"]:
            return f"{what}: no shape in the row"
        dims = LLAMA.get((int(row["layers"]), int(row["hidden"])))
        if dims is None:
            return f"{what}: experts"
    if "offload" in row["activation_recompute"]:
        return f"{what}: activations offloaded by a policy of its own"
    precision = re.fullmatch(
        r"bf16|float8(?: (tensorwise|rowwise_with_gw_hp|rowwise))?( \+ f8 all-gather|, bf16 all-gather)?",
        row["precision"].lower(),
    )
    if precision is None:
        return f"{what}: precision {row['precision'].split(' ')[0].split('(')[0]}"
    if _machine(row["gpu"]) is None or "limited" in row["gpu"]:
        return f"{what}: {row['gpu']}"
    if "async TP;" in row["note"] or "AsyncTP" in row["note"]:
        return f"{what}: asynchronous tensor parallelism by symmetric memory"
    if _number(row, "cp") > 1:
        return f"{what}: context parallel"
    sequence = int(row["seq_len"])
    shape = Shape(
        "llama",
        int(row["layers"]),
        int(row["hidden"]),
        int(row["heads"]),
        dims[0],
        dims[1],
        dims[2],
        sequence,
        int(row["hidden"]) == 2048,
    )
    tp, pp, dp, micro = (_number(row, key) for key in ("tp", "pp", "dp", "micro_batch"))
    batch = int(row["global_batch"] or dp * micro)
    recompute = row["activation_recompute"] or "none"
    is_titan = "torch" in row["source"]
    run = Run(
        shape, _machine(row["gpu"]) or "", tp, pp, dp, 3 if row["zero_stage"].startswith("3") else 1, micro,
        batch // (dp * micro), "products" if recompute.startswith("selective") else recompute,
        "bfloat16" if precision[0] == "bf16" else f"float8 {precision[1] or 'tensorwise'}",
        int((re.search(r"VP=(\d+)", row["note"]) or [0, 1])[1]), tp > 1, True,
    )  # fmt: skip
    if pp > 1 and run.stage > 1:
        return f"{what}: ZeRO-3 in a pipeline"
    name = f"{row['model']} s{sequence} tp{tp} pp{pp} dp{dp} b{micro} m{run.num_micro} {recompute} {run.machine}"
    name += f" {run.dtype}" if "float8" in run.dtype else ""
    value, study = float(row["value"]), "torchtitan" if is_titan else "Megatron-Bridge"
    if is_memory:
        return Measured(study, name, run, memory=value * _MEMORY[row["unit"]])
    is_time = row["metric"] == "step_time"
    return Measured(study, name, run, value if is_time else batch * sequence / (value * tp * pp * dp))


def _autotuning(row: dict[str, str]) -> Measured | str:
    if row["metric"] != "samples_per_s_best_of_stage":
        return ""
    if not row["model"].startswith("gpt2"):
        return "DeepSpeedExamples autotuning: BERT and DeBERTa"
    if not row["zero_stage"]:
        return ""
    shape = _gpt(row, vocab=50257, dropout=0.1, attention="transformers")
    micro, dp = int(row["micro_batch"]), int(row["dp"])
    run = Run(shape, "v100-32g", 1, 1, dp, int(row["zero_stage"]), micro, 1, "none", "float16")
    name = f"{row['model']} zero{row['zero_stage']} b{micro}"
    return Measured("DeepSpeed autotuning", name, run, micro * dp / float(row["value"]))


def _megatron_ci(row: dict[str, str]) -> Measured | str:
    if row["metric"] != "iter_time":
        return ""
    if not row["model"].startswith("gpt3_7b"):
        return "Megatron-LM CI: 12 layers of 512, which the host of a CI machine takes most of the time for"
    shape = _gpt(row, kv_heads=8, dropout=0.1, tied=False)
    tp, pp, dp, micro = (_number(row, key) for key in ("tp", "pp", "dp", "micro_batch"))
    num = _number(row, "global_batch") // (dp * micro)
    virtual = 8 if pp > 1 else 1  # a layer for each virtual stage, as its model_config.yaml says
    run = Run(
        shape, _machine(row["gpu"]) or "", tp, pp, dp, 1, micro, num, virtual_stages=virtual, is_fused=True
    )  # fmt: skip
    return Measured(
        "Megatron-LM CI", f"7B tp{tp} pp{pp} dp{dp} b{micro} m{num} {run.machine}", run, float(row["value"])
    )


_READERS = {
    "Megatron-LM CI golden values": _megatron_ci,
    "MosaicML llm-foundry benchmarks": _mosaic,
    "vTrain ground truth single-node": _vtrain,
    "Narayanan SC21 Table 1": _megatron,
    "Narayanan SC21 Table 2": _megatron,
    "Korthikanti 2022 Table 5": _megatron,
    "Korthikanti 2022 text": _megatron,
    "Megatron-Core README table": _megatron_core,
    "torchtitan 2024-12": _llama,
    "torchtitan async TP 2025-06": _llama,
    "torchtitan 2024 A100 page": _llama,
    "torchtitan 2024 405B": _llama,
    "torchao training page": _llama,
    "torchao training page B200": _llama,
    "torchtitan auto_perf_maxing PR 3975": _llama,
    "torchtitan auto_perf_maxing PR 3943": _llama,
    "Megatron-Bridge perf summary": _llama,
    "DeepSpeedExamples autotuning HF": _autotuning,
}
# One of so many rows of a study, which are alike.
_EVERY = {"vTrain": 60, "MosaicML A100": 5, "MosaicML H100": 2, "Narayanan SC21": 2}


def read(path: Path) -> tuple[list[Measured], Counter[str]]:
    """The rows that can be dry-run, and how many could not, by reason."""
    rows: list[Measured] = []
    dropped: Counter[str] = Counter()
    with path.open() as file:
        for row in csv.DictReader(file):
            reader = _READERS.get(row["source"])
            made = reader(row) if reader else f"{row['source']}: not read"
            if isinstance(made, Measured):
                rows.append(made)
            elif made:
                dropped[made] += 1
    kept: list[Measured] = []
    seen: Counter[str] = Counter()
    for each in sorted(rows, key=lambda row: (row.study, row.name)):
        every = _EVERY.get(each.study, 1)
        if seen[each.study] % every == 0 or each.memory:
            kept.append(each)
        else:
            dropped[f"{each.study}: one of every {every} rows is used"] += 1
        seen[each.study] += 1
    return kept, dropped
