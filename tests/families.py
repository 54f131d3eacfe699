"""Every causal family of Transformers as a small model, and its training with and without Shoal."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import run_ranks
from shoal.errors import ShoalError

VOCABULARY, LENGTH, ROWS, STEPS = 64, 16, 2, 3
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
    """A model whose attention is ``shoal``, which has to be registered. Raises: CannotBeSmallError."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        usual = CONFIG_MAPPING[family]()
        options = {name: value for name, value in SMALL.items() if hasattr(usual, name)}
        if hasattr(usual, "kv_lora_rank"):  # multi-head latent attention has keys of its own for each head
            options["num_key_value_heads"] = options["num_attention_heads"]
        if isinstance(getattr(usual, "layer_types", None), list):
            options["layer_types"] = (usual.layer_types * 2)[:2]
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
        model = AutoModelForCausalLM.from_config(config, attn_implementation="shoal").train()
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
    """``equal``, ``refused`` with a clear error, ``said`` by a warning or a note; or what went wrong."""
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
        return "refused" if error.code != "comm-timeout" else f"hung: {error}"
    except Exception as error:
        return "said" if handler.found or getattr(error, "__notes__", ()) else f"{type(error).__name__}: {error}"
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
        return "said" if errors[worst] > EXACT else f"equal, and warned: {handler.found[0]}"
    return "equal" if errors[worst] < BOUND else f"{worst} differs by {errors[worst]:.1e}"
