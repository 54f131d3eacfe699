"""The model that a command names, and a micro-batch for it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.data.lengths import longest_sequences
from shoal.errors import UsageError
from shoal.models import GPT, NAMED_SHAPES, named_config
from shoal.optional import import_optional

Batch = tuple[Any, ...] | dict[str, Any]  # the arguments of the model's forward


def build_model(model: str, sequence: int | None = None) -> nn.Module:
    """The model that MODEL names: a size of ``shoal train``, a Hugging Face folder or config.json, or module:function.

    Args:
        sequence: tokens of the longest sequence, of a size of ``shoal train``; None: the size's own.

    Raises: UsageError: there is none.
    """
    if model.lower() in NAMED_SHAPES:
        return GPT(named_config(model, sequence_length=sequence))
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return _from_hugging_face(path)
    module_name, _, function_name = model.partition(":")
    if not function_name:
        raise UsageError(
            f"{model!r} is no folder or file, and no size of `shoal train`.",
            do=f"name a folder with a config.json, one of {', '.join(NAMED_SHAPES)}, or module:function.",
        )
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module_name), function_name)()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{model!r} cannot be called: {error}.", do="name module:function.") from error
    if not isinstance(made, nn.Module):
        raise UsageError(f"{model!r} returned a {type(made).__name__}, not a torch.nn.Module.")
    return made


def _from_hugging_face(path: Path) -> nn.Module:
    transformers = import_optional("transformers", f"the configuration {path}", "transformers")
    config = transformers.AutoConfig.from_pretrained(path.parent, local_files_only=True)
    causal = config.__class__ in transformers.AutoModelForCausalLM._model_mapping
    made: nn.Module = (transformers.AutoModelForCausalLM if causal else transformers.AutoModel).from_config(config)
    return made


def longest_sequence(model: nn.Module) -> int | None:
    """Tokens that a language model takes; None: it is none."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "vocab_size", None) is None:
        return None
    return next(iter(longest_sequences(model).values()), 2048)


def token_batch(model: nn.Module, num_rows: int, sequence: int | None, num_parts: int = 1) -> Batch:
    """A micro-batch of a language model on one rank: its own tokens are its labels.

    Args:
        sequence: tokens of a whole row; None: as many as the model takes, at most 4096.
        num_parts: into which ranks of ``sp`` and ``cp`` split a row.

    Raises: UsageError: the model is no language model; the row does not divide.
    """
    longest = longest_sequence(model)
    if longest is None:
        raise UsageError(
            f"{type(model).__name__} has no config.vocab_size: its micro-batches are not known.",
            do="pass batch=, a function of the rows of a micro-batch that returns the arguments of the model.",
            code="dry-run-batch",
        )
    length = sequence or min(longest, 4096)
    if length % num_parts:
        raise UsageError(
            f"rows of {length} tokens cannot be divided among {num_parts} ranks of sp and cp.",
            do="give a sequence that divides.",
            code="dry-run-batch",
        )
    tokens = torch.zeros(num_rows, length // num_parts, dtype=torch.long)
    if isinstance(model, GPT):
        return (tokens, tokens)
    made = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    if num_parts > 1:
        made["position_ids"] = torch.arange(length // num_parts).expand(num_rows, -1)
    return made


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returns: the tensor of one number, or the attribute ``loss``.

    Raises: UsageError: it has none.
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", output)
    if isinstance(loss, tuple | list) and loss:
        loss = loss[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UsageError(
            f"the model returned a {type(output).__name__} without a loss.",
            do="pass labels in batch=, or loss=, a function of what the model returns.",
            code="dry-run-batch",
        )
    return loss.reshape(())


def attend_by_ranks(model: nn.Module) -> None:
    """Let attention run over the ranks of ``sp`` and ``cp``, as a script has to that uses them."""
    from shoal.parallel.sequence.attention import attention

    if isinstance(model, GPT):
        model.attend_by(attention)
    elif hasattr(model, "set_attn_implementation"):
        from shoal.parallel.sequence.huggingface import register

        register()
        model.set_attn_implementation("shoal")  # type: ignore[operator]


def as_builder(model: str | Callable[[], nn.Module], sequence: int | None) -> Callable[[], nn.Module]:
    """A function that builds the model. Args: ``model``: as of ``build_model``, or the function."""
    if isinstance(model, str):
        name = model
        return lambda: build_model(name, sequence)
    return model
