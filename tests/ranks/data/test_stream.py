"""Runs over a token stream in any layout: the tokens and the losses of one process, and which ranks read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.data import InMemorySource, TokenStream, split
from shoal.data.sources.token_file import TokenFile, TokenFileWriter
from shoal.errors import ShoalError, UsageError
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.loss import count_tokens
from shoal.pipeline.module import PipelineModule
from tests.helpers.data_layouts import LENGTH, PACKINGS, Layout, check, random_legs, stream

# More of them, on more ranks and with workers: tests/nightly.
SEEDS = (1, 6, 10, 16)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_layouts_kills_and_resumes_change_no_token_and_no_loss(seed: int, tmp_path: Path) -> None:
    check(random_legs(seed, 3), PACKINGS[seed % 4], tmp_path)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2)], ids=str
)
def test_packed_documents_in_pipeline_stages_have_the_bits_of_one_rank(schedule: str, virtual: int) -> None:
    def job(pp: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = GPT(GPTConfig(64, LENGTH, 4, 16, 2, tied=False))  # of tied ones the order of two sums differs
        model.load_state_dict(weights)
        model.attend_by(shoal.attention)
        config = {**Layout(micro_batch=2, accumulation=4).config(), "gradient_clipping": 0.0}
        if pp > 1:
            config |= {"parallel": {"pp": pp}, "pipeline": {"schedule": schedule, "virtual_stages": virtual}}
        engine: Any = shoal.initialize(model=model, config=config, training_data=stream("first_fit"))[0]
        losses = []
        if pp == 1:
            for batch, _ in zip(engine.training_dataloader, range(8), strict=False):
                loss = engine(*batch)
                engine.backward(loss, num_tokens=count_tokens(batch.targets))
                engine.step()
                losses.append(float(loss.detach()))
        else:
            losses = [float(engine.train_batch()) for _ in range(2)]
        values = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return losses, values

    torch.manual_seed(0)
    weights = GPT(GPTConfig(64, LENGTH, 4, 16, 2, tied=False)).state_dict()
    (_, expected), *_ = run_ranks(1, job, 1)
    assert not torch.equal(expected["embedding.weight"], weights["embedding.weight"])
    for _, values in run_ranks(2, job, 2):
        assert all(torch.equal(value, expected[name]) for name, value in values.items())


# who reads


def count_reads(data: TokenStream) -> list[int]:
    """The documents that are read from now on."""
    reads: list[int] = []

    def counted(tokens: Callable[..., Any]) -> Callable[..., Any]:
        def read(index: int, *given: int) -> Any:
            reads.append(index)
            return tokens(index, *given)

        return read

    for packed in data._sources:
        packed.source.tokens = counted(packed.source.tokens)  # type: ignore[method-assign]
    return reads


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads.append(index)
        return torch.full((4,), float(index)), torch.ones(4)


class Tokens(Samples):
    """Samples of one length, whose batches have a form that is known without reading."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads.append(index)
        return torch.full((LENGTH,), index), torch.full((LENGTH,), index)

    def form(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.empty(len(indices), LENGTH, dtype=torch.int64, device="meta")
        return tokens, tokens


def of_layers() -> PipelineModule:
    return PipelineModule([nn.Linear(4, 4) for _ in range(4)], num_stages=4, loss_fn=nn.functional.mse_loss)


def of_blocks() -> nn.Module:
    model = GPT(GPTConfig(64, LENGTH, 4, 16, 2))
    model.attend_by(shoal.attention)
    return model


@pytest.mark.parametrize(
    ("make", "data", "more", "between"),
    [
        (of_blocks, "stream", {}, "nothing"),
        (of_blocks, "stream", {"data": {"read_on_every_stage": True}}, "all"),
        (of_blocks, "tokens", {}, "nothing"),
        (of_layers, "samples", {}, "nothing"),
        (of_layers, "samples", {"pipeline": {"schedule": "zb_h1"}}, "nothing"),
    ],
)
def test_stages_between_the_first_and_the_last_read_nothing(
    make: Any, data: str, more: dict[str, Any], between: str, tmp_path: Path
) -> None:
    def job(num_steps: int, resumes: bool) -> tuple[int, float, Any]:
        dataset: Any = stream("first_fit") if data == "stream" else Tokens() if data == "tokens" else Samples()
        reads = count_reads(dataset) if data == "stream" else dataset.reads
        config = {**Layout(micro_batch=2, accumulation=4).config(), "loss_reduction": "mean", **more}
        config |= {"parallel": {"pp": 4}}
        torch.manual_seed(0)
        engine: Any = shoal.initialize(model=make(), config=config, training_data=dataset)[0]
        if resumes:
            engine.load_checkpoint(tmp_path)
        losses = [float(engine.train_batch()) for _ in range(num_steps)]
        position = engine.training_dataloader.state_dict()
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        return len(reads), losses[-1], position

    for resumes in (False, True):
        ranks = run_ranks(4, job, 2, resumes)
        first, *rest, last = [reads for reads, *_ in ranks]
        assert first == last > 0
        assert rest == ([0, 0] if between == "nothing" else [first, first])
        assert all(position == ranks[0][2] for *_, position in ranks)  # which any rank may save


class Words:
    """A tokenizer with files in two folders."""

    name, vocab_size, end_of_text, fingerprint = "words", 64, None, "0123"

    def save(self, folder: Path) -> None:
        (folder / "more").mkdir(parents=True)
        (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
        (folder / "more" / "chat.jinja").write_text("{{ messages }}", encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, tokens: Any) -> str:
        return " ".join("-" * token for token in tokens)


def test_checkpoints_have_the_tokenizer_of_their_data(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with TokenFileWriter(tmp_path / name, tokenizer=Words()) as writer:
            writer.write(range(60))
    others = InMemorySource([range(60)])

    def job(folder: str, has_others: bool) -> None:
        sources = [TokenFile(tmp_path / "a"), others if has_others else TokenFile(tmp_path / "b")]
        data = split(sources, 0.3, LENGTH)[0]
        engine: Any = shoal.initialize(model=nn.Linear(4, 4), config=Layout().config(), training_data=data)[0]
        engine.save_checkpoint(tmp_path / folder)
        (tmp_path / folder / "tokenizer" / "tokenizer.json").unlink(missing_ok=True)
        engine.save_checkpoint(tmp_path / folder, tag="again")  # written once
        engine.load_checkpoint(tmp_path / folder)

    run_ranks(2, job, "run", False)
    assert (tmp_path / "run" / "tokenizer" / "more" / "chat.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "run" / "tokenizer" / "tokenizer.json").exists()
    run_ranks(1, job, "mixed", True)
    assert not (tmp_path / "mixed" / "tokenizer").exists()


def test_tensor_parallel_ranks_read_by_themselves_and_send_no_batch() -> None:
    def job() -> tuple[int, list[str]]:
        data = stream("first_fit")
        reads = count_reads(data)
        config = Layout(micro_batch=2, accumulation=4).config() | {"parallel": {"tp": 2}}
        loader = shoal.initialize(model=of_blocks(), config=config, training_data=data)[2]
        with current_world().recorder.recording() as entries:
            for _, _ in zip(loader, range(4), strict=False):
                pass
        return len(reads), [entry.op for entry in entries]

    (first, sent), (second, _) = run_ranks(2, job)
    assert first == second > 0
    assert sent == []


def test_a_stage_that_uses_tokens_it_has_not_read_says_so() -> None:
    def job() -> str:
        config = Layout(micro_batch=2, accumulation=4).config() | {"parallel": {"pp": 4}}
        engine: Any = shoal.initialize(model=of_blocks(), config=config, training_data=stream("none"))[0]
        engine.set_batch_fn(lambda batch: (batch.tokens.clone().cpu(), *batch[1:]))
        with pytest.raises((NotImplementedError, UsageError)) as caught:
            engine.train_batch()
        return " ".join(getattr(caught.value, "__notes__", []))

    first, second, *_ = run_ranks(4, job)
    assert "read_on_every_stage" in second and not first


def test_a_checkpoint_of_other_data_is_refused_with_each_difference_in_one_error(tmp_path: Path) -> None:
    def job(packing: Any, seed: int, first: int) -> str:
        sources = [InMemorySource([range(n, 40) for n in range(first, 20)], "chats")]
        data = TokenStream(sources, LENGTH, packing=packing, seed=seed)
        engine: Any = shoal.initialize(model=of_blocks(), config=Layout().config(), training_data=data)[0]
        if packing == "greedy":
            engine.save_checkpoint(tmp_path)
            return ""
        with pytest.raises(ShoalError) as caught:
            engine.load_checkpoint(tmp_path)
        return str(caught.value)

    run_ranks(1, job, "greedy", 1, 1)
    (message,) = run_ranks(1, job, "none", 2, 2)
    assert "its packing was greedy, this run's is none" in message
    assert "its seed was 1, this run's is 2" in message
    assert "data source 0, 'chats', is not what it was" in message


def test_a_loaded_checkpoint_says_whose_seed_the_data_keep_and_stateful_false_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = [torch.full((4,), float(number)) for number in range(16)]

    def job(seed: int, stateful: bool = True) -> list[float]:
        config = {**Layout().config(), "data": {"seed": seed, "stateful": stateful}}
        engine: Any = shoal.initialize(model=nn.Linear(4, 1), config=config, training_data=data)[0]
        batches = iter(engine.training_dataloader)
        if not (tmp_path / "latest").exists():
            next(batches)
            engine.save_checkpoint(tmp_path)
        else:
            engine.load_checkpoint(tmp_path)
        return [number for batch in engine.training_dataloader for number in batch[:, 0].tolist()]

    (saved,) = run_ranks(1, job, 1)
    caplog.clear()
    assert run_ranks(1, job, 2) == [saved]
    assert "data.seed: 1 when saved, which is used, 2 in this config; set data.stateful to false" in caplog.text
    assert caplog.text.count("data.seed") == 1
    caplog.clear()
    (anew,) = run_ranks(1, job, 2, False)
    assert len(anew) == 16 and anew[-len(saved) :] != saved
    assert "data.seed: 1 when saved, 2 now" in caplog.text
