"""A configuration that asks for a part of DeepSpeed's that is not there is refused by that part's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoal.compat import finder
from shoal.errors import ConfigError

ELASTIC = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4], "model_parallel_size": 2}
QUANTIZED = {"weight_quantization": {"shared_parameters": {"enabled": True}, "different_groups": {}}}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"elasticity": {**ELASTIC, "num_gpus_per_node": 2}}, r"model_parallel_size: 2 .*model-parallel ranks"),
    ({"hybrid_engine": {"enabled": True}}, r": generation while training"),
    ({"compile": {"deepcompile": True, "symmetric_memory": True}}, ": collectives over symmetric memory"),
    ({"compression_training": QUANTIZED}, r": compression"),
    ({"graph_harvesting": True}, r": CUDA graphs"),
    ({"checkpoint": {"use_node_local_storage": True}}, r": checkpoints on disks that nodes do not share"),
    ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, r"zenflow(.|\n)*offload_optimizer\.device"),
    ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}, "use stage 0"),
    ({"amp": {"enabled": True, "opt_level": "O1"}}, r"amp\.enabled: true is not supported(.|\n)*torch_autocast"),
    ({"nebula": {"enabled": True}}, r"nebula\.enabled: true is not supported(.|\n)*`checkpoint`"),
    ({"quantize_training": {"enabled": True}}, r"quantize_training: .* is not supported"),
    ({"eigenvalue": {"enabled": True}}, r"eigenvalue\.enabled: true is not supported"),
    ({"moe": {"enabled": True}}, r"moe: no such key"),
]


@pytest.fixture(autouse=True)
def deepspeed_alias() -> Iterator[None]:
    finder.install(children=False)
    yield
    finder.uninstall()


@pytest.mark.parametrize(("sections", "said"), REFUSED, ids=lambda value: next(iter(value), "") if value else "")
def test_a_part_that_is_not_there_is_refused_by_name(sections: dict[str, Any], said: str) -> None:
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **sections}
    with pytest.raises(ConfigError, match=said):
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config, dist_init_required=False)
