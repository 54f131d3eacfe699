"""``load_hf`` reads quantised folders of the Hub: the bits that Transformers dequantises, by ranges."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shoal
from shoal.checkpoint.formats.huggingface import SafetensorsWeights
from shoal.checkpoint.loading_hf import load_hf
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.clients.test_expert_models import build
from tests.clients.test_expert_training import WholeExperts, settings

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

pytestmark = pytest.mark.filterwarnings("default")

transformers.utils.logging.disable_progress_bar()  # its thread would stay

BLOCK = 16


def quantise_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of blocks; the matrix is padded to whole blocks."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: len(weight), : weight.shape[1]] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).view_as(padded)[: len(weight), : weight.shape[1]]
    return values.to(torch.float8_e4m3fn), scales


def write_fp8(model: Any, folder: Path) -> None:
    """As DeepSeek publishes its models: every matrix but embeddings, head and routers."""
    model.save_pretrained(folder)
    written = {}
    for name, value in load_file(folder / "model.safetensors").items():
        written[name] = value
        if value.dim() == 2 and not any(kept in name for kept in ("embed_tokens", "lm_head", "mlp.gate.")):
            written[name], written[f"{name}_scale_inv"] = quantise_fp8(value.float())
    save(folder, written, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]})


def write_mxfp4(model: Any, folder: Path) -> None:
    """As OpenAI publishes GPT-OSS: random codes and scales of the experts' matrices."""
    model.save_pretrained(folder)
    written = {}
    generator = torch.Generator().manual_seed(7)
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            written[name] = value
            continue
        experts, columns, rows = value.shape
        shape = (experts, rows, columns // 32)
        written[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        written[f"{name}_scales"] = torch.randint(118, 126, shape, dtype=torch.uint8, generator=generator)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    save(folder, written, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def save(folder: Path, tensors: dict[str, torch.Tensor], section: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))


WRITERS = {"deepseek_v3": write_fp8, "qwen3_moe": write_fp8, "gpt_oss": write_mxfp4}
SHAPES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 67}


def quantised(family: str, folder: Path) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A folder; its model, and what Transformers dequantises from it in bf16."""
    shapes = {name: size for name, size in SHAPES.items() if not (family == "gpt_oss" and name.startswith("moe"))}
    if family == "deepseek_v3":
        shapes |= {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    model = build(family, **shapes).to(torch.bfloat16)
    WRITERS[family](model, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert not any(value.dtype.itemsize == 1 for value in theirs.state_dict().values())
    return theirs, theirs.state_dict()


def empty_model(folder: Path) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))


SECTIONS: dict[str, dict[str, Any]] = {
    "ep": {},
    "ep and tp": {"parallel": {"tp": 2}},
    "experts split by tp": {
        "parallel": {"tp": 2},
        "expert_parallel": {"enabled": True, "expert_tensor_parallel_size": 2},
    },
}


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("family", WRITERS)
def test_a_quantised_folder_has_the_bits_of_transformers_on_ranks_that_read_their_experts_only(
    tmp_path: Path, family: str, section: str
) -> None:
    _, expected = quantised(family, tmp_path)
    experts = {value.shape for name, value in expected.items() if ".experts." in name and value.dim() == 3}
    is_split = section == "experts split by tp"  # rows of all experts are read, in pieces
    num_read = dict.fromkeys(range(2), 0)
    original = SafetensorsWeights.read_range

    def read_range(self: Any, name: str, begin: int, end: int) -> torch.Tensor:
        num_read[current_world().rank] += (end - begin) * (".experts." in name)
        return original(self, name, begin, end)

    models = [empty_model(tmp_path) for _ in range(2)]
    config = settings(2, bf16={"enabled": True}, **SECTIONS[section])

    def job() -> dict[str, torch.Tensor]:
        empty = models[current_world().rank]
        with WholeExperts(experts) as whole:
            engine, *_ = shoal.initialize(model=empty, config=copy.deepcopy(config))
            load_hf(empty, tmp_path)
        assert whole.found == [] or is_split
        assert not hasattr(empty.config, "quantization_config")
        values: dict[str, torch.Tensor] = engine.module_state_dict()
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsWeights, "read_range", read_range)
        for found in run_ranks(2, job):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (name, value.dtype, found[name].dtype)
    files = load_file(tmp_path / "model.safetensors")
    num_stored = sum(tensor.numel() for name, tensor in files.items() if ".experts." in name)
    assert num_read[0] == num_read[1]
    assert num_read[0] == num_stored // 2 or is_split


@pytest.mark.parametrize("family", WRITERS)
def test_a_model_that_was_loaded_from_a_quantised_folder_is_exported_whole_and_without_quantisation(
    tmp_path: Path, family: str
) -> None:
    _, expected = quantised(family, tmp_path / "from")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "from")

    def job() -> nn.Module:
        model = load_hf(copy.deepcopy(config), tmp_path / "from", dtype=torch.bfloat16)
        engine, *_ = shoal.initialize(model=model, config=settings(3, bf16={"enabled": True}))
        engine.save_16bit_model(tmp_path / "to")
        return model

    run_ranks(2, job)[0].config.save_pretrained(tmp_path / "to")
    assert "quantization_config" not in json.loads((tmp_path / "to" / "config.json").read_text())
    alone = load_hf(empty_model(tmp_path / "from").to_empty(device="cpu"), tmp_path / "from")
    alone.save_pretrained(tmp_path / "alone")
    for folder in ("to", "alone"):
        again, problems = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(problems.values())
        for name, value in again.state_dict().items():
            assert torch.equal(value, expected[name]), name
