"""Runs over a token stream in any layout: the tokens and the losses of one process, and which ranks read them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.data import InMemorySource, TokenStream, split
from shoal.data.analysis import SINGLE, DataAnalyzer
from shoal.data.sources.token_file import TokenFile, TokenFileWriter
from shoal.errors import ShoalError, UsageError
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.loss import count_tokens
from shoal.parallel.sequence.chunks import Documents
from shoal.pipeline.module import PipelineModule
from tests.helpers.data_layouts import LENGTH, PACKINGS, Layout, check, random_legs, stream
from tests.helpers.deepspeed_samples import metric

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


class Lines(torch.utils.data.IterableDataset[Any]):
    """Samples as a stream, which begins anew in the second step."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.reads = samples, samples.reads

    def __iter__(self) -> Any:
        return (self.samples[index] for index in range(12))


def with_documents(samples: list[Any]) -> list[Any]:
    """A batch of a form that the data set does not know: rows of two documents."""
    tokens, targets = (torch.stack(part) for part in zip(*samples, strict=True))
    documents = Documents.of_lengths([[LENGTH - 5, 5]] * len(samples))
    positions = torch.cat([torch.arange(LENGTH - 5), torch.arange(5)]).expand_as(tokens)
    return [tokens, targets, positions, documents, "taken out by the batch function"]


def measured(folder: Path) -> dict[str, Any]:
    """A config by which samples are chosen by a measure."""
    DataAnalyzer(
        range(64),
        batch_size=64,
        metric_names=["size"],
        metric_functions=[torch.tensor],
        metric_types=[SINGLE],
        save_path=folder,
        collate_fn=list,
    ).run_map_reduce()
    measures = {"size": metric("size", folder, 32, 63)}
    sampling = {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": measures}}
    return {"data_efficiency": {"enabled": True, "data_sampling": sampling}}


def of_layers() -> PipelineModule:
    return PipelineModule([nn.Linear(4, 4) for _ in range(4)], num_stages=4, loss_fn=nn.functional.mse_loss)


def of_blocks(num: int = 4) -> nn.Module:
    model = GPT(GPTConfig(64, LENGTH, num, 16, 2))
    generator = torch.Generator().manual_seed(0)  # ranks that are threads share torch's own
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
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
        (of_layers, "lines of samples", {}, "nothing"),
        (of_blocks, "lines of tokens", {}, "nothing"),
        (of_blocks, "documents", {}, "nothing"),
        (partial(of_blocks, 8), "documents", {"pipeline": {"schedule": "zbv", "virtual_stages": 2}}, "nothing"),
        (of_blocks, "curriculum", {}, "nothing"),
    ],
)
def test_stages_between_the_first_and_the_last_read_nothing(
    make: Any, data: str, more: dict[str, Any], between: str, tmp_path: Path
) -> None:
    if data == "curriculum":
        more = more | measured(tmp_path / "analysis")

    def job(num_steps: int, resumes: bool, more: dict[str, Any]) -> tuple[int, float, Any]:
        samples = Samples() if make is of_layers else Tokens()
        dataset: Any = stream("first_fit") if data == "stream" else Lines(samples) if "lines" in data else samples
        reads = count_reads(dataset) if data == "stream" else dataset.reads
        config = {**Layout(micro_batch=2, accumulation=4).config(), "loss_reduction": "mean", **more}
        config |= {"parallel": {"pp": 4}}
        collate = with_documents if data == "documents" else None
        engine: Any = shoal.initialize(model=make(), config=config, training_data=dataset, collate_fn=collate)[0]
        if data == "documents":
            engine.set_batch_fn(lambda batch: batch.pop() and batch)  # on each stage, of the batch that was read
        if resumes:
            engine.load_checkpoint(tmp_path)
        losses = [float(engine.train_batch()) for _ in range(num_steps)]
        position = engine.training_dataloader.state_dict()
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        return len(reads), losses[-1], position

    expected = {3: 0} if "virtual_stages" in more.get("pipeline", {}) else {}  # there rank 0 has the last stage too
    for resumes in (False, True):
        ranks = run_ranks(4, job, 2, resumes, more)
        first = ranks[0][0]
        all_or_none = first if between == "all" else 0
        assert first > 0
        assert [reads for reads, *_ in ranks] == [first, all_or_none, all_or_none, expected.get(3, first)]
        if "lines" not in data:  # where a stream ends, only those know that read it
            assert all(position == ranks[0][2] for *_, position in ranks)  # which any rank may save
    if data in ("lines of tokens", "documents", "curriculum"):  # what was sent is what is read
        every = run_ranks(4, job, 4, False, more | {"data": {"read_on_every_stage": True}})
        assert [reads for reads, *_ in every] == 4 * [every[0][0]] and every[0][1] == ranks[0][1]


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


def test_an_iterable_data_set_is_trained_on_and_resumed_on_other_ranks(tmp_path: Path) -> None:
    def job(num_steps: int, micro_batch: int, resumes: bool) -> list[list[int]]:
        config = {"train_micro_batch_size_per_gpu": micro_batch, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        data = Lines(Samples())
        engine, _, loader, _ = shoal.initialize(model=nn.Linear(4, 4), config=config, training_data=data)
        if resumes:
            engine.load_checkpoint(tmp_path)
        seen = []
        for _, (inputs, _) in zip(range(num_steps), loader, strict=False):
            engine.backward(engine(inputs).sum())
            engine.step()
            seen.append(inputs[:, 0].int().tolist())
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        return seen

    assert run_ranks(2, job, 2, 2, False) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert run_ranks(1, job, 2, 3, True) == [[[8, 9, 10], [11]]]


def test_a_batch_that_cannot_be_sent_to_the_stages_between_is_an_error_on_all_and_none_need_be_given() -> None:
    def job() -> list[str]:
        config = Layout(micro_batch=2, accumulation=4).config() | {"parallel": {"pp": 4}, "loss_reduction": "mean"}
        engine: Any = shoal.initialize(model=of_blocks(), config=config)[0]
        batches = [[torch.stack(part) for part in zip(*(Tokens()[at] for at in pair), strict=True)] for pair in PAIRS]
        is_between = not (engine.is_first_stage() or engine.is_last_stage())
        texts = []
        for wrong in ([np.ones(2)], []):
            own = iter([batch + wrong for batch in batches])
            try:
                engine.train_batch(None if is_between else own)
            except UsageError as error:
                texts.append(str(error))
        return texts

    PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]
    for rank, (text,) in enumerate(run_ranks(4, job)):
        assert "a ndarray, which cannot be sent to the stages that do not read it" in text
        assert ("read_on_every_stage" in text) and (rank == 0 or "rank 0" in text)


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
