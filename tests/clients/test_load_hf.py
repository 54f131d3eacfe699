"""``load_hf`` with transformers: a model's saved folder fills a model that is built from its configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal import zero
from shoal.checkpoint.formats.huggingface import HuggingFaceSource, SafetensorsWeights, write_huggingface
from shoal.checkpoint.loading_hf import load_hf
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import CheckpointError, UsageError

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

pytestmark = pytest.mark.filterwarnings("default")

transformers.utils.logging.disable_progress_bar()  # its thread would stay

SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(*, is_tied: bool) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        **SHAPE, intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=is_tied, eos_token_id=None
    )
    torch.manual_seed(5)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> torch.nn.Module:
    torch.manual_seed(5)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64))


MODELS = {"llama": lambda: llama(is_tied=False), "llama, tied": lambda: llama(is_tied=True), "gpt2": gpt2}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_becomes_the_saved_model(tmp_path: Path, name: str, world: int) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = transformers.AutoConfig.from_pretrained(tmp_path)

    def job() -> dict[str, torch.Tensor]:
        loaded = load_hf(config, tmp_path)
        assert type(loaded) is type(model)
        with zero.GatheredParameters(list(loaded.parameters())):
            return {name: parameter.detach().clone() for name, parameter in loaded.named_parameters()}

    expected = dict(model.named_parameters())
    for found in run_ranks(world, job):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_what_shoal_writes_is_what_from_pretrained_loads(tmp_path: Path) -> None:
    model = llama(is_tied=True)
    model.save_pretrained(tmp_path / "a")
    write_huggingface(HuggingFaceSource(tmp_path / "a"), tmp_path / "b", max_file_nbytes=20_000)
    model.config.save_pretrained(tmp_path / "b")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "b")
    for name, parameter in model.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], parameter)


def test_from_pretrained_ties_what_save_16bit_model_wrote_once(tmp_path: Path) -> None:
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}

    def job() -> dict[str, torch.Tensor]:
        engine, *_ = shoal.initialize(model=models[current_world().rank], config=settings)
        engine.save_16bit_model(tmp_path)
        values: dict[str, torch.Tensor] = engine.module_state_dict()
        engine.destroy()
        return values

    models = [llama(is_tied=True) for _ in range(2)]
    expected = run_ranks(2, job)[0]
    models[0].config.save_pretrained(tmp_path)
    loaded, problems = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(problems.values())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_base_model_takes_the_weights_of_one_with_a_head(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path)
    loaded = load_hf(transformers.GPT2Model(model.config), tmp_path, strict=False)
    assert torch.equal(loaded.h[0].attn.c_attn.weight, model.transformer.h[0].attn.c_attn.weight)


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="got a dict"):
        load_hf({"hidden": 3}, tmp_path)


def test_a_family_that_is_first_imported_inside_zero_init_is_whole_afterwards() -> None:
    script = Path(__file__).parent / "scripts" / "first_import_inside_init.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    first, second = map(float, done.stdout.split("losses ")[1].split())
    assert 3.0 < first < 5.5
    assert 3.0 < second < 5.5


def neox() -> torch.nn.Module:
    torch.manual_seed(5)
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SHAPE, intermediate_size=48))


STAGED = {**MODELS, "neox": neox}


@pytest.mark.parametrize("name", STAGED)
def test_pipeline_stages_take_every_name_of_a_folder_between_them(tmp_path: Path, name: str) -> None:
    model = STAGED[name]()
    model.save_pretrained(tmp_path)
    expected = model.state_dict()
    config = {"train_micro_batch_size_per_gpu": 1, "parallel": {"pp": 2}}
    models = [type(model)(model.config) for _ in range(2)]

    def job() -> dict[str, torch.Tensor]:
        rank = current_world().rank
        engine: Any = shoal.initialize(model=models[rank], config=config)[0]
        load_hf(engine.module if rank == 0 else models[rank], tmp_path)  # the script's model is of the same stages
        values: dict[str, torch.Tensor] = engine.module_state_dict()
        return values

    for found in run_ranks(2, job):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)


def test_a_folder_with_the_old_name_of_a_head_is_read(tmp_path: Path) -> None:
    model = neox()
    model.save_pretrained(tmp_path)
    with SafetensorsWeights(tmp_path) as stored:
        assert "embed_out.weight" in stored.tensors
    loaded = load_hf(transformers.GPTNeoXForCausalLM(model.config), tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_names_that_no_stage_takes_or_the_folder_lacks_are_listed_over_all_stages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama(is_tied=False)
    values = model.state_dict()
    values["model.layers.0.mlp.more.weight"] = values.pop("model.layers.0.mlp.up_proj.weight")
    values["head.weight"] = values.pop("lm_head.weight")
    model.save_pretrained(tmp_path, state_dict=values)
    config = {"train_micro_batch_size_per_gpu": 1, "parallel": {"pp": 2}}
    models = [llama(is_tied=False) for _ in range(2)]
    missing = "missing in the folder (2):\n    model.layers.0.mlp.up_proj.weight\n    lm_head.weight"
    left = "not in the model (2):"

    def job() -> str:
        engine: Any = shoal.initialize(model=models[current_world().rank], config=config)[0]
        with pytest.raises(CheckpointError) as error:
            load_hf(engine.module, tmp_path)
        load_hf(engine.module, tmp_path, strict=False)
        return str(error.value)

    for message in run_ranks(2, job):
        assert missing in message
        assert left in message
        assert "head.weight\n" in message
        assert "model.layers.0.mlp.more.weight" in message
    (warning,) = [record.getMessage() for record in caplog.records if "strict=False" in record.getMessage()]
    assert missing in warning
    assert left in warning
