"""Every causal family of Transformers as a small model, and its training with and without Shoal.

python -m tests.helpers.families --write docs/reference/model-families.md    trains them all and writes the page
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import json
import logging
import multiprocessing
import os
import pathlib
import re
import resource
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import run_ranks
from shoal.errors import ShoalError

VOCABULARY, LENGTH, ROWS, STEPS = 64, 16, 2, 2
OPTIMIZER = {"lr": 1e-2, "eps": 0.1, "weight_decay": 0.01}  # a large eps: an update is in proportion to the gradient
# Of a parameter's movement. A rounding that crosses the kink of a ReLU moves single elements by up to 1e-3 of it; what
# is computed wrongly differs by 1e-2 and more.
BOUND, EXACT = 1e-3, 1e-6
MAX_NUMEL = 3_000_000

_WIDTHS = (
    "hidden_size n_embd d_model embed_dim word_embed_proj_dim moe_intermediate_size shared_expert_intermediate_size"
)
_LAYERS = "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"
_HEADS = "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"
_LENGTHS = (
    "max_position_embeddings n_positions n_ctx vocab_size intermediate_size ffn_dim ffn_hidden_size encoder_ffn_dim"
    " decoder_ffn_dim"
)
_DROPOUTS = (
    "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout activation_dropout hidden_dropout_prob"
    " attention_probs_dropout_prob resid_dropout residual_dropout embedding_dropout layerdrop router_jitter_noise"
)
SMALL: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS.split(), 32),
    **dict.fromkeys(_LAYERS.split(), 2),
    **dict.fromkeys(_HEADS.split(), 4),
    **dict.fromkeys(_LENGTHS.split(), VOCABULARY),
    **dict.fromkeys(_DROPOUTS.split(), 0.0),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "v_head_dim", "rotary_dim", "sliding_window", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "qk_nope_head_dim": 4,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "eos_token_id"), 1),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
}
# Of families whose configurations check what belongs together.
OF_FAMILY: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "n_groups": 1},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "ep 2": {"parallel": {"ep": 2}, "expert_parallel": {"enabled": True}, "zero_optimization": {"stage": 3}},
    "sp 2": {"parallel": {"sp": 2}},
    "cp 2": {"parallel": {"cp": 2}},
    "tp 2": {"parallel": {"tp": 2}},
    "tp 2 sequence": {"parallel": {"tp": 2, "tp_sequence_parallel": True}},
    "pp 2": {"parallel": {"pp": 2}, "gradient_accumulation_steps": 2},
}


class CannotBeSmallError(Exception):
    """A configuration that has other keys, or values that depend on each other."""


def build(family: str) -> nn.Module:
    """A model whose attention is ``shoal``, which has to be registered, where it can be.

    Raises: CannotBeSmallError.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        usual = CONFIG_MAPPING[family]()
        options = {name: value for name, value in SMALL.items() if hasattr(usual, name)}
        if hasattr(usual, "kv_lora_rank"):  # multi-head latent attention has keys of its own for each head
            options["num_key_value_heads"] = options["num_attention_heads"]
        if isinstance(getattr(usual, "layer_types", None), list):
            options["layer_types"] = (usual.layer_types * 2)[:2]
        options |= OF_FAMILY.get(family, {})
        config: Any = None
        for refused in (None, "layer_types", "head_dim", "v_head_dim"):  # some derive these themselves
            options.pop(refused, None) if refused else None
            try:
                config = CONFIG_MAPPING[family](**options)
                break
            except (AttributeError, TypeError, ValueError):
                continue
        assert config is not None, "its configuration takes other keys"
        if isinstance(getattr(config, "mlp_layer_types", None), list):
            config.mlp_layer_types = config.mlp_layer_types[:2]
        with torch.device("meta"):
            numel = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        assert numel <= MAX_NUMEL, f"{numel:,} parameters"
        config.use_cache = False
        torch.manual_seed(0)
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="shoal").train()
        except KeyError:  # its own table of attentions
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
        for has_labels in (False, True):
            trained_alone(model, 1, has_labels=has_labels)
    except Exception as error:
        raise CannotBeSmallError(f"{type(error).__name__}: {error}") from error
    return model


def batch(step: int, index: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(
        2, VOCABULARY - 2, (ROWS, LENGTH), generator=torch.Generator().manual_seed(10 * step + index)
    )
    return {"input_ids": tokens, "position_ids": torch.arange(LENGTH).expand(ROWS, LENGTH)}


def loss_of(model: Any, step: int, index: int, context: shoal.SequenceContext | None = None) -> torch.Tensor:
    """Against the tokens themselves, so that all positions count where a sequence is cut."""
    context = context or shoal.SequenceContext()
    inputs = {name: context.shard(tensor) for name, tensor in batch(step, index).items()}
    if "position_ids" not in inspect.signature(getattr(model, "module", model).forward).parameters:
        del inputs["position_ids"]
    logits = model(**inputs).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), inputs["input_ids"].roll(1, 0).flatten())


def trained_alone(model: nn.Module, num_batches: int, *, has_labels: bool) -> dict[str, torch.Tensor]:
    """The parameters after some steps of torch's AdamW on one process."""
    mine: Any = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(mine.parameters(), **OPTIMIZER)
    for step in range(STEPS):
        for index in range(num_batches):
            tokens = batch(step, index)["input_ids"]
            loss = mine(input_ids=tokens, labels=tokens).loss if has_labels else loss_of(mine, step, index)
            (loss / num_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(mine.named_parameters())


def trained_by_shoal(model: nn.Module, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters after the same steps on two ranks; in pipeline stages the model's own loss."""

    def job() -> dict[str, torch.Tensor]:
        optimizer = {"optimizer": {"type": "AdamW", "params": OPTIMIZER}, "gradient_clipping": 0.0}
        config = {"train_micro_batch_size_per_gpu": ROWS, **optimizer, **settings}
        engine: Any = shoal.initialize(model=copy.deepcopy(model), config=config)[0]
        for step in range(STEPS):
            if "gradient_accumulation_steps" in settings:
                tokens = [batch(step, index)["input_ids"] for index in range(2)]
                engine.train_batch(iter([{"input_ids": each, "labels": each} for each in tokens]))
            else:
                engine.backward(loss_of(engine, step, engine.axes.batch.rank, engine.sequence_context))
                engine.step()
        state: dict[str, torch.Tensor] = engine.module_state_dict()
        engine.destroy()
        return state

    found: dict[str, torch.Tensor] = run_ranks(2, job, timeout=240)[0]
    return found


class _Warnings(logging.Handler):
    """What the engine says of models that do not fit a layout."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(("each rank of ", "tensor parallelism: ")):
            self.found.append(text)


def outcome(model: nn.Module, layout: str) -> str:
    """``equal``, ``refused: `` and a clear error, ``said: `` and a warning or a note; or what went wrong."""
    is_pipeline = layout.startswith("pp")
    num_batches = 2 if layout in ("stage 3", "ep 2", "pp 2") else 1
    expected = trained_alone(model, num_batches, has_labels=is_pipeline)
    again = trained_alone(model, num_batches, has_labels=is_pipeline)
    if any(not torch.equal(again[name], value) for name, value in expected.items()):
        return "random"
    logger, handler = logging.getLogger("shoal"), _Warnings()
    logger.addHandler(handler)
    try:
        found = trained_by_shoal(model, LAYOUTS[layout])
    except ShoalError as error:
        return f"refused: {error.what}" if error.code != "comm-timeout" else f"hung: {error}"
    except Exception as error:
        said = [*handler.found, *getattr(error, "__notes__", ())]
        return f"said: {said[0]}" if said else f"{type(error).__name__}: {error}"
    finally:
        logger.removeHandler(handler)
    missing = expected.keys() - found.keys()
    if missing:
        return f"not in the state: {sorted(missing)[:3]}"
    start = dict(model.named_parameters())
    errors = {
        name: (found[name] - value).norm().item()
        / max((value - start[name]).norm().item(), 1e-4 * value.numel() ** 0.5)
        for name, value in expected.items()
        if value.numel()
    }
    worst = max(errors, key=lambda name: errors[name])
    if handler.found:
        return f"said: {handler.found[0]}" if errors[worst] > EXACT else f"equal, and warned: {handler.found[0]}"
    return "equal" if errors[worst] < BOUND else f"wrong: {worst} differs by {errors[worst]:.1e}"


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


@contextlib.contextmanager
def attention_over_ranks() -> Iterator[None]:
    """Transformers knows the attention ``shoal`` inside the block."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from shoal.parallel.sequence.huggingface import register

    tables: list[Any] = [each._global_mapping for each in (AttentionMaskInterface, AttentionInterface)]
    before = [dict(table) for table in tables]
    register()
    try:
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)


# The page of model families.

PAGE = """# Model families of Transformers

Made by `python -m tests.helpers.families --write docs/reference/model-families.md` with Transformers {version}; do not
edit it.

A small model of each causal family is trained for {steps} steps of AdamW in fp32 on two ranks, and each parameter is
compared with that of plain PyTorch on one. How to set the axes: [parallelism](../how-to/parallelism.md).

- *yes*: equal, within {bound:.1%} of the parameter's movement.
- *named* and a number: the model does not fit the axis, and the engine says so by a warning, or by a note on the
  model's own error. *refused* and a number: by a Shoal error. The numbers are of the messages below.
- *wrong* and a number: other values, or an error that is not Shoal's.
- *no experts*: `ep` is refused, because nothing of the family is known as experts.
- *random*: the model itself trains differently each time. *not tried*: over {seconds} seconds of one core.

| | {columns} |
| --- | {rules} |
{summary}

| family | {columns} |
| --- | {rules} |
{rows}

## Messages

{messages}

## Families without a small model

Their configurations take other keys, or hold several models, whose text model is often a family of its own
(`gemma3_text`).

{without}
"""
COLUMNS = {"stage 3": "ZeRO 3", "tp 2": "`tp`", "tp 2 sequence": "`tp`, sequence parallel", "sp 2": "`sp`"}
COLUMNS |= {"cp 2": "`cp`", "pp 2": "`pp`", "ep 2": "`ep`"}
WORDS = {"equal": "yes", "refused": "refused", "said": "named", "random": "random", "not tried": "not tried"}
SECONDS = 40  # of one core, for one family


def _write_results(family: str, path: str) -> None:
    """Append one line of JSON for each layout; runs in a process of its own, which may be killed."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)

    def write(layout: str, result: str) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps([family, layout, result]) + "\n")

    with attention_over_ranks():
        try:
            model = build(family)
        except CannotBeSmallError as error:
            write("", str(error))
            return
        for layout in COLUMNS:
            write(layout, outcome(model, layout))
        write("end", "")


def _cell(result: str, messages: list[str]) -> str:
    if "has no expert layer" in result:
        return "no experts"
    kind, _, text = result.partition(": ")
    if not text:
        return WORDS.get(kind, kind)
    text = re.sub(r"/\S*/", "", re.sub(r"\s+", " ", text)).strip()  # files without their folders
    text = re.sub(r"\b[A-Za-z]\w*(For[A-Z]\w+|LMHeadModel)\b", "the model", re.sub(r"\.\d+\b", ".*", text))
    text = re.sub(r"^[Ee]ach rank of [cs]p", "Each rank of sp and cp", text)
    text = ", ".join(dict.fromkeys(re.split(r"(?<=[\w\)\]*]\.) ", text)[0].rstrip(".").split(", ")))
    text = f"{text[:200].rstrip()} ..." if len(text) > 200 else text.rstrip(".") + "."
    text = re.sub(r"([|<*])", r"\\\1", text)
    if text not in messages:
        messages.append(text)
    return f"{WORDS.get(kind, 'wrong')} {messages.index(text) + 1}"


def page(results: list[tuple[str, str, str]]) -> str:
    import transformers

    found: dict[str, dict[str, str]] = {}
    complete: set[str] = set()
    for family, layout, result in results:  # of several runs the last one counts
        if family in complete or family not in found:
            found[family] = {}
            complete.discard(family)
        found[family][layout] = result
        complete |= {family} if layout in ("", "end") else set()
    messages: list[str] = []
    rows = {
        family: [_cell(of.get(layout, "not tried"), messages) for layout in COLUMNS]
        for family, of in sorted(found.items())
        if "" not in of
    }
    words = ["yes", "named", "refused", "wrong", "no experts", "random", "not tried"]
    counts = [[sum(row[at].startswith(word) for row in rows.values()) for at in range(len(COLUMNS))] for word in words]
    return PAGE.format(
        version=transformers.__version__,
        steps=STEPS,
        bound=BOUND,
        seconds=SECONDS,
        columns=" | ".join(COLUMNS.values()),
        rules=" | ".join("---" for _ in COLUMNS),
        summary="\n".join(
            f"| {word} | {' | '.join(map(str, of))} |" for word, of in zip(words, counts, strict=True) if any(of)
        ),
        rows="\n".join(f"| {family} | {' | '.join(row)} |" for family, row in rows.items()),
        messages="\n".join(f"{index}. {text}" for index, text in enumerate(messages, 1)) or "None.",
        without="\n".join(
            f"- {family}: {of[''].splitlines()[0][:160]}" for family, of in sorted(found.items()) if "" in of
        )
        or "None.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", required=True, type=pathlib.Path, help="the page")
    parser.add_argument(
        "--results",
        type=pathlib.Path,
        default=pathlib.Path("build/families.jsonl"),
        help="one line for each family and layout; families whose lines are complete are not trained again",
    )
    parser.add_argument("--only", nargs="*", help="these families, again; default: those without results")
    arguments = parser.parse_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.touch()

    def results() -> list[tuple[str, str, str]]:
        return [json.loads(line) for line in arguments.results.read_text(encoding="utf-8").splitlines()]

    done = {family for family, layout, _ in results() if layout in ("", "end")}
    for family in arguments.only or [name for name in names() if name not in done]:
        child = multiprocessing.get_context("fork").Process(
            target=_write_results, args=(family, os.fspath(arguments.results))
        )
        child.start()
        child.join(10 * SECONDS)  # other work of the machine may slow it
        child.kill()
        child.join()
        if child.exitcode:
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps([family, "end", ""]) + "\n")
        arguments.write.write_text(page(results()), encoding="utf-8")
        print(family, flush=True)
    arguments.write.write_text(page(results()), encoding="utf-8")


if __name__ == "__main__":
    main()
