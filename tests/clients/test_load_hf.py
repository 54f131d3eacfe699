"""``load_hf`` with transformers: a model's saved folder fills a model that is built from its configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal import zero
from shoal.checkpoint.formats.huggingface import HuggingFaceSource, write_huggingface
from shoal.checkpoint.loading_hf import load_hf
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]

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
