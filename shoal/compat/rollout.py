"""DeepSpeed's interface for generation during training by reinforcement learning or distillation.

    rollout = build_rollout(RolloutConfig(), student_engine=engine, tokenizer=tokenizer)
    batch = rollout.generate(RolloutRequest(prompt_ids, prompt_attention_mask), SamplingConfig(max_new_tokens=64))

``HybridEngineRollout`` calls the model's ``generate()`` inside ``unwrap_model_for_generation``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from shoal.compat.absent import not_built
from shoal.compat.zero_init import unwrap_model_for_generation
from shoal.errors import ConfigError, UsageError


class RolloutValueError(UsageError, ValueError):
    """Tensors that do not fit each other. DeepSpeed raises a ValueError, so it is one too."""


def _check_mask(name: str, mask: torch.Tensor, ids_name: str, ids: torch.Tensor) -> None:
    if mask.shape != ids.shape:
        raise RolloutValueError(f"{name} shape {tuple(mask.shape)} does not match {ids_name} {tuple(ids.shape)}.")


@dataclass
class RolloutRequest:
    """Prompts. Shape of both: [prompts, tokens]; padded on the left. Raises: RolloutValueError: the shapes differ."""

    prompt_ids: torch.Tensor
    prompt_attention_mask: torch.Tensor

    def __post_init__(self) -> None:
        _check_mask("prompt_attention_mask", self.prompt_attention_mask, "prompt_ids", self.prompt_ids)


@dataclass
class RolloutBatch:
    """Prompts with their responses, padded on the right, [sequences, tokens]; and where each response begins.

    Raises: RolloutValueError: the shapes differ.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    response_start_idx: torch.Tensor

    def __post_init__(self) -> None:
        _check_mask("attention_mask", self.attention_mask, "input_ids", self.input_ids)

    @property
    def batch_size(self) -> int:
        return self.input_ids.shape[0]

    @property
    def seq_len(self) -> int:
        return self.input_ids.shape[1]


@dataclass
class SamplingConfig:
    """How tokens are chosen."""

    max_new_tokens: int
    temperature: float = 1.0  # 0: the most likely token
    top_p: float = 1.0
    top_k: int = -1  # below 1: all tokens
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None  # sequences that are decoded together while others wait; not built


@dataclass
class RolloutConfig:
    """Which engine generates."""

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False


class RolloutEngine(ABC):
    """Generates responses. Derive from it, and write ``generate`` and ``sync_weights``."""

    name = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """The prompts with a response to each."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Take the weights after ``step``."""

    def shutdown(self) -> None:  # noqa: B027 - an engine that holds nothing has nothing to write
        """Release what the engine holds."""


class HybridEngineRollout(RolloutEngine):
    """Generates with the model that is trained, which has ``generate()``, as those of Transformers."""

    def __init__(self, engine: Any, tokenizer: Any, cfg: Any = None) -> None:
        if getattr(cfg, "use_graph_capture", False):
            raise not_built("rollout with use_graph_capture", "leave it out.")
        self._engine = engine
        self._eos = getattr(tokenizer, "eos_token_id", None)
        pad = getattr(tokenizer, "pad_token_id", None)
        self._pad = self._eos if pad is None else pad
        if self._pad is None:
            raise RolloutValueError("the tokenizer has neither pad_token_id nor eos_token_id.", do="set one of them.")

    @torch.no_grad()
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """The prompts with ``n_samples_per_prompt`` responses each. Every rank calls.

        Raises: NotBuiltError: ``continuous_batch_size``.
        Communicates: stage 3: one gather of all parameters.
        Memory: stage 3: all parameters, until it returns.
        """
        if sampling.continuous_batch_size is not None:
            raise not_built("SamplingConfig.continuous_batch_size", "leave it out.")
        prompts = request.prompt_ids.to(self._engine.device)
        choice: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            choice = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
            choice["top_k"] = max(sampling.top_k, 0)
        was_training = self._engine.module.training
        self._engine.module.eval()
        try:
            with unwrap_model_for_generation(self._engine) as model:
                make: Any = model.generate
                ids = make(
                    input_ids=prompts.repeat_interleave(sampling.n_samples_per_prompt, 0),
                    attention_mask=self._prompt_mask(request, sampling),
                    max_new_tokens=sampling.max_new_tokens,
                    pad_token_id=self._pad,
                    eos_token_id=self._eos,
                    **choice,
                )
        finally:
            self._engine.module.train(was_training)
        width = prompts.shape[1]
        mask = torch.cat([self._prompt_mask(request, sampling), self._response_mask(ids[:, width:])], dim=1)
        return RolloutBatch(ids, mask, torch.full((ids.shape[0],), width, device=ids.device))

    def _prompt_mask(self, request: RolloutRequest, sampling: SamplingConfig) -> torch.Tensor:
        mask = request.prompt_attention_mask.to(self._engine.device)
        return mask.repeat_interleave(sampling.n_samples_per_prompt, 0)

    def _response_mask(self, response: torch.Tensor) -> torch.Tensor:
        """1 up to the first end of text, and there."""
        if self._eos is None:
            return torch.ones_like(response)
        is_end = response == self._eos
        is_kept: torch.Tensor = is_end.cumsum(1) - is_end.long() == 0
        return is_kept.to(response.dtype)

    def sync_weights(self, step: int) -> None:
        """Nothing: the weights are those that are trained."""


def build_rollout(rollout_cfg: Any, student_engine: Any = None, tokenizer: Any = None, **kwargs: Any) -> RolloutEngine:
    """The engine that ``rollout_cfg.engine`` names.

    Raises: ConfigError: there is no such engine, or what it needs is missing.
    """
    if rollout_cfg.engine != "hybrid_engine":
        raise ConfigError(f"Unknown rollout engine {rollout_cfg.engine!r}.", do="choose 'hybrid_engine'.")
    if student_engine is None or tokenizer is None:
        raise ConfigError("hybrid_engine rollout needs both student_engine and tokenizer.", do="pass them.")
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg)
