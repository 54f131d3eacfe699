"""``shoal estimate``: the memory of one rank at each stage and offload, without allocating the model."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.usage import MODEL_HELP
from shoal.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shoal.engine.estimate import Estimate

_USABLE = 0.9  # of the device's memory; the rest is the CUDA context, fragments and NCCL's buffers
_TIER_NAMES = {"device": "none", "host": "cpu", "disk": "nvme"}


def estimate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Data-parallel ranks.")] = 8,
    stage: Annotated[
        list[int] | None, typer.Option(min=0, max=3, help="ZeRO stage; may be given several times. Default: all.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of one device, such as 80GB or 24GiB; the table then marks the rows that fit."),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. Default: the file's, else bf16.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per rank and forward pass. Default: the file's, else 1.")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence. Default: the model's, at most 4096.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Hugging Face models: recompute the activations of each block.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="A DeepSpeed-style JSON file; its stage and offload are replaced.")
    ] = None,
    disk: Annotated[bool, typer.Option("--disk", help="Also estimate offload to a local disk.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with sizes in bytes.")] = False,
) -> None:
    """Estimate the memory of one rank, by kind, for each ZeRO stage and offload."""
    from shoal.device import fake_tensors
    from shoal.engine.estimate import estimate as estimate_one
    from shoal.engine.estimate import variants
    from shoal.planner.model_of import build_model
    from shoal.text import format_count, parse_bytes

    settings = _config(config, precision, micro_batch)
    limit = None if memory is None else parse_bytes(memory)
    if memory is not None and limit is None:
        raise UsageError(f"--memory {memory!r} is not a size with a unit.", do="write it as 80GB or 24GiB.")
    with fake_tensors():
        made = build_model(model, sequence)
        estimates = [estimate_one(made, one, ranks) for one in variants(settings, stage or range(4), with_disk=disk)]
        numel = sum({id(p): p.numel() for p in made.parameters()}.values())
        activations, note = _activations(made, settings, sequence, recompute=recompute)
    if as_json:
        print(json.dumps([_as_dict(one, activations, limit) for one in estimates], indent=2))
        return
    kind = next((name for name in ("bf16", "fp16") if settings.get(name, {}).get("enabled")), "fp32")
    optimizer = settings["optimizer"]["type"]
    print(f"{model}: {format_count(numel)} parameters, {kind}, {optimizer}. Memory of each of {ranks} ranks:\n")
    print(_table(estimates, activations, limit))
    print()
    for paragraph in (note, *_advice(estimates, activations, limit, memory)):
        print(textwrap.fill(paragraph, 118, break_on_hyphens=False))


def _config(path: Path | None, precision: str | None, micro_batch: int | None) -> dict[str, Any]:
    """The file, with defaults: bf16, AdamW and a micro-batch of 1."""
    from shoal.config import load

    settings: dict[str, Any] = {}
    if path is not None:
        load(path)  # names every problem of the file
        settings = json.loads(path.read_text(encoding="utf-8"))
    if precision not in (None, "fp32", "fp16", "bf16"):
        raise UsageError(f"--precision {precision}: expected bf16, fp16 or fp32.")
    if precision is not None or path is None:
        for name in ("bf16", "fp16"):
            settings[name] = {**settings.get(name, {}), "enabled": name == (precision or "bf16")}
    settings = {key: value for key, value in settings.items() if value != "auto"}
    for key in ("train_batch_size", "scheduler", "elasticity"):
        settings.pop(key, None)
    settings["train_micro_batch_size_per_gpu"] = micro_batch or settings.get("train_micro_batch_size_per_gpu", 1)
    settings["optimizer"] = {"type": "AdamW", **settings.get("optimizer", {}), "params": {"lr": 1e-3}}
    return settings


def _activations(
    model: nn.Module, settings: dict[str, Any], sequence: int | None, *, recompute: bool
) -> tuple[int | None, str]:
    """Bytes of activations of one micro-batch, and a sentence about them."""
    import torch

    from shoal.engine.estimate import activation_nbytes
    from shoal.models import GPT
    from shoal.planner.model_of import longest_sequence, loss_of, token_batch

    size: int = settings["train_micro_batch_size_per_gpu"]
    if longest_sequence(model) is None:
        return None, "Activations are not counted: this command can run language models only."
    given = token_batch(model, size, sequence)
    length = next(iter(given.values() if isinstance(given, dict) else given)).shape[1]
    dtype = next((d for name, d in _DTYPES.items() if settings.get(name, {}).get("enabled")), "float32")

    def run(model: nn.Module) -> torch.Tensor:
        return loss_of(model(**given) if isinstance(given, dict) else model(*given))

    if recompute and not isinstance(model, GPT):
        enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    try:
        nbytes = activation_nbytes(model.train(), getattr(torch, dtype), run)
    except Exception as error:  # the model's own code, run without values
        return None, f"Activations are not counted: the model does not run without values ({type(error).__name__})."
    how = "without recomputation"
    if recompute and not isinstance(model, GPT):
        how = "with each block recomputed; activations inside the block that is being recomputed are not counted"
    return nbytes, f"Activations are those of a micro-batch of {size} x {length} tokens, {how}."


_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def _fits(one: Estimate, activations: int | None, limit: int) -> bool:
    from shoal.sharding.placement import Tier

    return one.on(Tier.DEVICE) + (activations or 0) <= _USABLE * limit


def _as_dict(one: Estimate, activations: int | None, limit: int | None) -> dict[str, Any]:
    nbytes = {f"{kind} ({tier.value})": value for (kind, tier), value in one.nbytes.items() if value}
    fits = None if limit is None else _fits(one, activations, limit)
    return {
        "stage": one.stage,
        "offload_optimizer": _TIER_NAMES[one.state_tier.value],
        "offload_param": _TIER_NAMES[one.parameter_tier.value],
        "bytes": nbytes,
        "activations": activations,
        "fits": fits,
    }


def _offload(one: Estimate) -> str:
    from shoal.sharding.placement import Tier

    moved = [
        name for name, tier in (("optimizer", one.state_tier), ("params", one.parameter_tier)) if tier != Tier.DEVICE
    ]
    if not moved:
        return "none"
    return " + ".join(moved) + (" on disk" if one.state_tier is Tier.DISK else "")


def _table(estimates: list[Estimate], activations: int | None, limit: int | None) -> str:
    from shoal.sharding.placement import Tier
    from shoal.text import format_bytes, table

    device = Tier.DEVICE
    has_disk = any(one.on(Tier.DISK) for one in estimates)
    headers = ["stage", "offload", "parameters", "gradients", "optimizer", "gathered", "buffers", "activations"]
    headers += ["device", "host", *(["disk"] if has_disk else []), *(["fits"] if limit is not None else [])]
    rows = []
    for one in estimates:
        kinds = [("parameter",), ("gradient",), ("master", "optimizer state"), ("gathered",), ("buffers",)]
        cells = [str(one.stage), _offload(one), *(format_bytes(one.on(device, *names)) for names in kinds)]
        cells.append("?" if activations is None else format_bytes(activations))
        cells += [format_bytes(one.on(device) + (activations or 0)), format_bytes(one.on(Tier.HOST))]
        cells += [format_bytes(one.on(Tier.DISK))] * has_disk
        if limit is not None:
            cells.append("yes" if _fits(one, activations, limit) else "no")
        rows.append(["-" if cell == "0 B" else cell for cell in cells])
    return table(rows, headers)


def _advice(
    estimates: list[Estimate], activations: int | None, limit: int | None, memory: str | None
) -> tuple[str, str]:
    """What the columns are, and what follows from them."""
    text = "optimizer: main parameters (fp32) and optimizer state. host, disk: memory of one rank; a machine"
    text += " needs it for each of its ranks."
    if limit is None:
        return text, "Add --memory 80GB (the memory of one device) to see which rows fit."
    first = next((one for one in estimates if _fits(one, activations, limit)), None)
    if first is None:
        return text, (
            f"Nothing fits in {memory}: use more ranks, --recompute, a smaller micro-batch or shorter sequences, or"
            ' divide the layers ("parallel": {"tp": ...}).'
        )
    zero: dict[str, Any] = {"stage": first.stage}
    for key, tier in (("offload_optimizer", first.state_tier), ("offload_param", first.parameter_tier)):
        if _TIER_NAMES[tier.value] != "none":
            zero[key] = {"device": _TIER_NAMES[tier.value]}
    return text, (
        f"A row fits if its device memory is at most {_USABLE:.0%} of {memory}. The first row that fits communicates"
        f' least: "zero_optimization": {json.dumps(zero)}'
    )
