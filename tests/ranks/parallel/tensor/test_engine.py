"""Tensor parallelism from the JSON file, beside every ZeRO stage: parameters equal those of one process."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shoal
from shoal.access.engine_parameters import safe_get_full_fp32_param
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import ConfigError, ModelError, UsageError
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.tensor import vocab_parallel_cross_entropy
from tests.helpers.training import make, sgd

ROWS, LENGTH, VOCABULARY = 2, 8, 50
STEPS = 5


def gpt(*, tied: bool = True, num_heads: int = 4) -> GPT:
    return GPT(GPTConfig(VOCABULARY, LENGTH, 2, 8 * num_heads, num_heads, tied))


def tokens(step: int, num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (ROWS * num_rows, LENGTH + 1), generator=generator)


def config(stage: int, tp: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})},
        **more,
        "parallel": {"tp": tp, **more.get("parallel", {})},
    }


def alone(
    factory: Any, dp: int, accumulation: int = 1, *, steps: int = STEPS, is_anew: bool = False
) -> dict[str, torch.Tensor]:
    """``is_anew``: each step has an optimizer of its own."""
    model = make(factory)
    optimizer = sgd(model.parameters())
    for step in range(steps):
        if is_anew:
            optimizer = sgd(model.parameters())
        for micro in range(accumulation):
            batch = tokens(10 * step + micro, dp)
            (model(batch[:, :-1], batch[:, 1:]) / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(engine: Any, steps: range, accumulation: int = 1, *, num_rows: int | None = None) -> None:
    num_rows = num_rows or ROWS
    batch = engine.axes.batch
    for step in steps:
        for micro in range(accumulation):
            whole = tokens(10 * step + micro, batch.size * num_rows // ROWS)
            rows = whole[num_rows * batch.rank : num_rows * (batch.rank + 1)]
            engine.backward(engine(rows[:, :-1], rows[:, 1:]))
            engine.step()


def initialize(model: torch.nn.Module, settings: dict[str, Any]) -> Any:
    return shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]


def assert_equal(values: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert set(values) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6, msg=name)


SEQUENCE = {"parallel": {"tp_sequence_parallel": True}}
HOST = {"zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("size", "tp", "stage", "accumulation", "more"),
    [
        (2, 2, 0, 1, {}),
        (4, 2, 1, 1, SEQUENCE),
        (4, 2, 2, 2, {}),
        (4, 2, 3, 1, {}),
        (4, 2, 3, 2, SEQUENCE),
        (4, 4, 3, 1, {"parallel": {"tp_loss_parallel": True}}),
        (4, 2, 2, 1, {"tensor_parallel": {"tp_overlap_comm": True}}),
        (4, 2, 3, 1, {"tensor_parallel": {"tp_overlap_comm": True}, **SEQUENCE}),
        (4, 4, 2, 2, {"tensor_parallel": {"tp_overlap_comm": "symmetric_memory"}, **SEQUENCE}),
        (8, 2, 3, 1, {"parallel": {"dp_replicate": 2}}),
        (8, 2, 3, 2, {"zero": {"zero_hpz_partition_size": 2}}),
        (4, 2, 3, 1, HOST),
        (4, 2, 2, 1, {"tensor_parallel": {"autotp_size": 2}, "parallel": {"tp": "auto"}}),
        (4, 2, 3, 1, {"activation_checkpointing": {"modules": ["blocks.*"]}}),
        (4, 4, 1, 2, {"parallel": {"tp_grid": "2d"}}),
        (8, 4, 3, 1, {"parallel": {"tp_grid": "2d", "tp_loss_parallel": True}}),
        (8, 8, 2, 1, {"parallel": {"tp_grid": "2.5d"}}),
    ],
)
def test_a_gpt_trains_as_in_one_process(
    size: int, tp: int, stage: int, accumulation: int, more: dict[str, Any]
) -> None:
    expected = alone(gpt, size // tp, accumulation)

    def job() -> dict[str, Any]:
        engine = initialize(make(gpt), config(stage, tp, accumulation, **more))
        train(engine, range(STEPS), accumulation)
        return engine.module_state_dict()

    for values in run_ranks(size, job):
        assert_equal(values, expected)


@pytest.mark.parametrize(
    ("size", "tp", "stage", "more"),
    [
        (2, 2, 0, {}),
        (4, 2, 3, SEQUENCE),
        (4, 4, 1, {"parallel": {"tp_loss_parallel": True}}),
        (4, 2, 3, {"tensor_parallel": {"tp_overlap_comm": True}, **HOST}),
        (4, 4, 1, {"parallel": {"tp_grid": "2d"}}),
    ],
)
def test_a_second_engine_takes_over_a_split_model(size: int, tp: int, stage: int, more: dict[str, Any]) -> None:
    expected = alone(gpt, size // tp, steps=3, is_anew=True)

    def job() -> dict[str, Any]:
        model, values = make(gpt), {}
        for step in range(3):
            engine = initialize(model, config(stage, tp, **copy.deepcopy(more)))
            train(engine, range(step, step + 1))
            values = engine.module_state_dict()
            engine.destroy()
        for other in (config(stage, 1), config(stage, tp, parallel={"tp_plan": {"head": "replicate"}})):
            with pytest.raises(ModelError, match=r"layers of GPT are split .* already"):
                initialize(model, other)
        return values

    for values in run_ranks(size, job):
        assert_equal(values, expected)


@pytest.mark.parametrize(("stage", "accumulation", "more"), [(1, 2, {}), (3, 1, HOST)])
def test_a_gpt_on_a_3_d_grid_trains_as_in_one_process(
    stage: int, accumulation: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.ROWS", 4)  # samples are split over q x q ranks
    test_a_gpt_trains_as_in_one_process(8, 8, stage, accumulation, {"parallel": {"tp_grid": "3d"}, **more})


@pytest.mark.parametrize(("size", "tp", "pp", "grid"), [(8, 4, 2, "2d"), (16, 4, 4, "2d")])
def test_stages_of_a_pipeline_send_what_each_rank_of_a_grid_has(size: int, tp: int, pp: int, grid: str) -> None:
    def layers() -> GPT:
        return GPT(GPTConfig(VOCABULARY, LENGTH, 4, 32, 4))

    expected = alone(layers, 1, 2)
    settings = config(1, tp, 2, parallel={"tp_grid": grid, "pp": pp})

    def job() -> dict[str, Any]:
        engine = initialize(make(layers), settings)
        for step in range(STEPS):
            micros = [tokens(10 * step + micro, 1) for micro in range(2)]
            engine.train_batch(iter([(micro[:, :-1], micro[:, 1:]) for micro in micros]))
        return engine.module_state_dict()

    for values in run_ranks(size, job):
        assert_equal(values, expected)


@pytest.mark.parametrize(
    ("tp", "more", "twice"),
    [
        (2, SEQUENCE, {}),
        (2, {"tensor_parallel": {"tp_overlap_comm": True}}, {}),
        # Both passes read the gathered gradient of a row parallel layer's output.
        (2, {"tensor_parallel": {"tp_overlap_comm": True}, **SEQUENCE}, {("tp", "all_gather"): 8}),
        (4, {"parallel": {"tp_grid": "2d"}}, {("tp:2x2x1/1,2", "all_reduce"): 8}),  # of norms
    ],
)
def test_the_halves_of_a_split_backward_share_the_collectives_of_a_whole_one(
    tp: int, more: dict[str, Any], twice: dict[tuple[str, str], int]
) -> None:
    """Of the second step, on the last stage."""

    def sent(schedule: str) -> Counter[tuple[str, str]]:
        parallel = {**more.get("parallel", {}), "pp": 2}
        settings = config(1, tp, 4, **{**more, "parallel": parallel}, pipeline={"schedule": schedule})

        def job() -> Counter[tuple[str, str]]:
            engine = initialize(make(lambda: gpt(tied=False)), settings)
            for step in range(2):
                micros = [tokens(10 * step + micro, 1) for micro in range(4)]
                with current_world().recorder.recording() as entries:
                    engine.train_batch(iter([(micro[:, :-1], micro[:, 1:]) for micro in micros]))
            return Counter((entry.axis, entry.op) for entry in entries if entry.axis.startswith("tp"))

        return run_ranks(2 * tp, job)[-1]

    whole, split = sent("1f1b"), sent("zb_h1")
    assert sum(whole.values()) > 24
    assert split - whole == Counter(twice)
    assert whole - split == Counter()


def test_hpz_gathers_for_backward_among_the_ranks_that_shard_a_part() -> None:
    """8 ranks, of 2 tensor-parallel ones: 4 shard a part, 2 of them hold it for backward."""

    def job() -> list[tuple[str, int]]:
        settings = config(3, 2, zero={"zero_hpz_partition_size": 2}, units={"classes": ["Block"]})
        engine = initialize(make(gpt), settings)
        train(engine, range(1))
        with current_world().recorder.recording() as entries:
            train(engine, range(1, 2))
        return [(e.axis, e.nbytes) for e in entries if e.op == "all_gather" and e.label.startswith("blocks.0")]

    for gathers in run_ranks(8, job):
        forward, again = ([nbytes for axis, nbytes in gathers if axis == name] for name in ("dp", "fsdp:2x2/1"))
        assert len(forward) == len(again) == 2  # of the parts, and of the norms
        assert [nbytes // 3 for nbytes in forward] == [nbytes // 2 for nbytes in again]


def heads_of_7() -> GPT:
    return gpt(tied=False, num_heads=7)


# Thresholds between the sizes of the ranks' parts: the ranks have the same units and buckets nevertheless.
NARROW = {"zero": {"reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 3200}}


@pytest.mark.parametrize(("tp", "stage", "more"), [(4, 3, {}), (2, 1, {}), (2, 2, NARROW), (2, 3, NARROW)])
def test_heads_and_vocabulary_that_do_not_divide(tp: int, stage: int, more: dict[str, Any]) -> None:
    expected = alone(heads_of_7, 4 // tp)

    def job() -> dict[str, Any]:
        engine = initialize(make(heads_of_7), config(stage, tp, **copy.deepcopy(more)))
        train(engine, range(STEPS))
        return engine.module_state_dict()

    for values in run_ranks(4, job):
        assert_equal(values, expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_on_the_meta_device_gets_the_values_of_one_process(stage: int) -> None:
    expected = {name: value.clone() for name, value in make(gpt, 0).state_dict().items()}

    def on_meta() -> GPT:
        with torch.device("meta"):
            return gpt()

    def job() -> tuple[dict[str, Any], int]:
        engine = initialize(on_meta(), config(stage, 2))
        return engine.module_state_dict(), sum(group.buffer.layout.parameter_numel for group in engine.sharded.groups)

    torch.manual_seed(0)
    (values, held), _ = run_ranks(2, job)
    assert set(values) == set(expected)
    assert held < 0.6 * sum(value.numel() for value in set(expected.values()))


class DrawsNorms(GPT):
    """Initializes as Hugging Face's models do; of a split model each rank draws numbers of its own."""

    def _init_weights(self, module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            torch.nn.init.normal_(parameter)


@pytest.mark.parametrize("stage", [1, 3])
def test_start_up_sends_whole_parameters_over_the_axis_once(stage: int) -> None:
    norms = [name for name, _ in gpt().named_parameters() if "norm" in name]

    def job(device: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
        with torch.device(device):
            model = DrawsNorms(gpt().config)
        with current_world().recorder.recording() as entries:
            engine = initialize(model, config(stage, 2))
        sent = [(entry.label, entry.nbytes) for entry in entries if (entry.axis, entry.op) == ("tp", "broadcast")]
        values = engine.module_state_dict()
        return sent, {name: values[name] for name in norms}

    sizes = {name: p.nbytes for name, p in gpt().named_parameters()}
    results = run_ranks(4, job, "cpu")
    assert [sent for sent, _ in results][1::2] == [list(sizes.items())] * 2
    results += run_ranks(4, job, "meta")
    assert [sent for sent, _ in results][5::2] == [[("root#1", 1536)]] * 2  # five norms, aligned and padded
    for _, values in results[:4]:
        assert_equal(values, results[0][1])
    for _, values in results[4:]:
        assert_equal(values, results[4][1])


@pytest.mark.parametrize(
    ("size", "tp", "stage", "more"), [(4, 2, 3, {}), (4, 2, 1, {}), (4, 4, 3, SEQUENCE), (4, 4, 3, {"tp_grid": "2d"})]
)
def test_a_model_that_zero_init_has_sharded_is_split_part_by_part(
    size: int, tp: int, stage: int, more: dict[str, Any]
) -> None:
    factory = gpt if "tp_grid" in more else heads_of_7
    whole = make(factory).state_dict()
    expected = alone(factory, size // tp)

    def job() -> tuple[dict[str, Any], int]:
        with shoal.zero.Init():
            model = factory()
        for name, parameter in model.named_parameters():
            with shoal.zero.GatheredParameters(parameter, modifier_rank=0):
                parameter.data.copy_(whole[name])
        engine = initialize(model, config(stage, tp, parallel=more.get("parallel", more)))
        assert all(torch.equal(value, whole[name]) for name, value in engine.module_state_dict().items())
        held = sum(group.buffer.layout.parameter_numel for group in engine.sharded.groups)
        train(engine, range(STEPS))
        return engine.module_state_dict(), held

    for values, held in run_ranks(size, job):
        assert_equal(values, expected)
        assert held < 1.2 / tp * sum(value.numel() for value in set(whole.values()))


def test_a_checkpoint_and_weights_change_their_layout(tmp_path: Path) -> None:
    def first() -> dict[str, Any]:
        engine = initialize(make(gpt), config(3, 2))
        train(engine, range(2))
        engine.save_checkpoint(tmp_path, "tag")
        engine.save_16bit_model(tmp_path / "weights", "model.bin")
        return engine.module_state_dict()

    expected = run_ranks(4, first)[0]
    whole = torch.load(tmp_path / "weights" / "model.bin", weights_only=True)
    assert all(torch.equal(whole[name], value) for name, value in expected.items())

    def second(stage: int, tp: int, grid: str, tag: str) -> dict[str, Any]:
        engine = initialize(make(gpt, 1), config(stage, tp, parallel={"tp_grid": grid}))
        engine.load_checkpoint(tmp_path, tag)
        engine.save_checkpoint(tmp_path, f"from-{grid}")
        found = engine.module_state_dict()
        engine.load_module_state_dict(found)
        train(engine, range(2, STEPS))
        return {**found, **{f"{name} at the end": value for name, value in engine.module_state_dict().items()}}

    ends = []
    for size, stage, tp, grid, tag in (
        (2, 2, 1, "1d", "tag"),
        (4, 1, 2, "1d", "tag"),
        (8, 3, 4, "1d", "tag"),
        (8, 3, 4, "2d", "tag"),
        (4, 2, 2, "1d", "from-2d"),
    ):
        values = run_ranks(size, second, stage, tp, grid, tag)[0]
        assert all(torch.equal(values[name], value) for name, value in expected.items())
        ends.append({name: value for name, value in values.items() if name.endswith("at the end")})
    for end in ends[1:]:
        assert_equal(end, ends[0])


def test_bad_plans_and_models_are_errors_before_memory_is_taken() -> None:
    def job() -> None:
        with pytest.raises(ModelError, match=r"names modules that the model does not have: blocks\.\*\.nothing"):
            initialize(make(gpt), config(1, 2, parallel={"tp_plan": {"blocks.*.nothing": "column"}}))
        with shoal.zero.Init():
            model = gpt()
        model.blocks[0].attention_norm.weight.tensor_model_parallel = True
        with pytest.raises(ModelError, match=r"1 parameters that are sharded are parts of larger tensors already"):
            initialize(model, config(3, 2))
        assert current_world().size == 2

    run_ranks(2, job)


class AttentionWithHeadValues(torch.nn.Module):
    """Attention with ``sinks`` as in GPT-OSS, and one more parameter.

    Args:
        other: "gain", one per query head; "scale", of the elements of each head; "late", added to the output.
    """

    def __init__(self, other: str) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 6, 4
        self.q_proj, self.o_proj = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)
        self.k_proj, self.v_proj = torch.nn.Linear(24, 12), torch.nn.Linear(24, 12)
        self.sinks = torch.nn.Parameter(torch.randn(6))
        sizes = {"gain": 6, "scale": self.head_dim, "late": 24}
        for name in {other} & set(sizes):
            setattr(self, name, torch.nn.Parameter(torch.randn(sizes[name])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
        scores = torch.cat([query @ key.mT, self.sinks.view(1, -1, 1, 1).expand(*query.shape[:3], 1)], -1).softmax(-1)
        mixed = scores[..., :-1] @ value
        if hasattr(self, "gain"):
            mixed = mixed * self.gain[:, None, None]
        if hasattr(self, "scale"):
            mixed = mixed * self.scale
        return self.o_proj(mixed.transpose(1, 2).flatten(2)) + (self.late if hasattr(self, "late") else 0)


class ModelWithHeadValues(torch.nn.Module):
    def __init__(self, other: str = "") -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 24)
        self.layers = torch.nn.ModuleList(AttentionWithHeadValues(other) for _ in range(2))
        self.head = torch.nn.Linear(24, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


HEAD_PLAN = {
    **dict.fromkeys(("layers.*.q_proj", "layers.*.k_proj", "layers.*.v_proj"), "column"),
    "layers.*.o_proj": "row",
    "layers.*": "prepare_input",
    "head": "replicate",
}


@pytest.mark.parametrize("tp", [2, 4])  # 4 heads and 2, since two share a head of keys; 2, 2, 1 and 1
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_attention_sinks_are_split_with_the_query_heads(stage: int, tp: int) -> None:
    expected = alone(ModelWithHeadValues, 1)

    def job() -> dict[str, torch.Tensor]:
        engine = initialize(make(ModelWithHeadValues), config(stage, tp, parallel={"tp_plan": HEAD_PLAN}))
        if stage == 0:
            assert 0 < len(engine.module.layers[0].sinks) < 6
        train(engine, range(STEPS))
        return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}

    for values in run_ranks(tp, job):
        for name, value in expected.items():
            assert (values[name] - value).abs().max() <= 1e-6 * value.abs().max(), name


@pytest.mark.parametrize(
    ("other", "is_prepared", "warning"),
    [
        ("late", True, "the gradient of layers.1.late is the same on all 2 ranks, and they are summed"),
        ("late", False, ""),
        ("scale", True, ""),
        ("scale", False, "the gradient of layers.1.scale differs on the 2 ranks, which hold the parameter whole"),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_whole_parameter_whose_gradient_is_not_as_the_plan_says_is_warned_of(
    other: str, is_prepared: bool, warning: str, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    def factory() -> torch.nn.Module:
        return ModelWithHeadValues(other)

    plan = {key: style for key, style in HEAD_PLAN.items() if is_prepared or style != "prepare_input"}
    expected = alone(factory, 1)

    def job() -> float:
        engine = initialize(make(factory), config(stage, 2, parallel={"tp_plan": plan}))
        train(engine, range(STEPS))
        names = {name: p for name, p in engine.module.named_parameters() if name.endswith(other)}
        return max(float((safe_get_full_fp32_param(p) - expected[name]).abs().max()) for name, p in names.items())

    far = max(run_ranks(2, job))
    found = [record.getMessage() for record in caplog.records if "the gradient of" in record.getMessage()]
    assert (far > 1e-5) == bool(warning)
    assert len(found) == (2 if warning else 0)  # one for each of two layers
    assert not warning or any(warning in text for text in found)


def test_an_error_in_a_module_with_split_layers_says_which_are_split() -> None:
    def job() -> list[str]:
        engine = initialize(make(lambda: ModelWithHeadValues("gain")), config(1, 2, parallel={"tp_plan": HEAD_PLAN}))
        with pytest.raises(RuntimeError, match="must match the size") as caught:
            train(engine, range(1))
        return caught.value.__notes__

    for notes in run_ranks(2, job):
        (note,) = [note for note in notes if "tensor-parallel" in note]
        assert "of layers.0 (AttentionWithHeadValues) q_proj, o_proj, k_proj, v_proj are split" in note
        assert '("skip") in parallel.tp_plan' in note


@pytest.mark.parametrize(("stage", "tp", "more"), [(1, 2, {}), (3, 2, {}), (3, 4, {"tp_grid": "2d"})])
def test_safetensors_fill_a_split_model(tmp_path: Path, stage: int, tp: int, more: dict[str, str]) -> None:
    whole = make(gpt, 7)
    save_file(
        {name: value for name, value in whole.state_dict().items() if name != "head.weight"}, tmp_path / "m.safetensors"
    )

    def job() -> dict[str, Any]:
        engine = initialize(make(gpt), config(stage, tp, parallel=more))
        shoal.load_hf(engine.module, tmp_path / "m.safetensors")
        parameter = engine.module.blocks[0].attention.qkv.weight
        assert torch.equal(safe_get_full_fp32_param(parameter), whole.blocks[0].attention.qkv.weight)
        return engine.module_state_dict()

    for values in run_ranks(4, job):
        assert all(torch.equal(values[name], value) for name, value in whole.state_dict().items())


def test_a_grid_is_refused_beside_what_is_of_one_dim_and_on_ranks_that_are_none() -> None:
    for more, size, error, message in (
        ({"tp_sequence_parallel": True, "tp_grid": "2d"}, 4, ConfigError, "turn those off"),
        ({"tp_grid": "2d"}, 2, ConfigError, "2 tensor parallel ranks are no 2d grid.*(?s:.)*set tp to 4"),
        ({"tp_grid": "3d"}, 8, UsageError, "dim 0 of .* does not divide by 4.*(?s:.)*pad it by 2"),
    ):

        def job(more: dict[str, Any] = more, size: int = size, error: Any = error, message: str = message) -> None:
            with pytest.raises(error, match=message):
                train(initialize(make(gpt), config(1, size, parallel=more)), range(1))

        run_ranks(size, job)


class Residual(torch.nn.Module):
    """A feed-forward layer that keeps a statistic of its output in ``aux``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(12, 24), torch.nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.nn.functional.gelu(self.up(x)))
        self.aux = x.square().mean()
        return x


class Collecting(torch.nn.Module):
    """A model whose loss has a statistic of the blocks.

    Args:
        kind: where the statistic is from: "aux", the blocks' attributes; "hook", what a forward hook collects; "list",
            the hidden states between them; "returned", those that a module around the blocks returns; "exit": the last
            block is left out, and positions are added to the output of the one before; "deep": each block's output
            has a loss of its own.
    """

    class Blocks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Residual() for _ in range(3))

        def forward(self, x: torch.Tensor, num_layers: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
            hidden = []
            for layer in self.layers[:num_layers]:
                x = layer(x)
                hidden.append(x)
            return x, hidden

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = torch.nn.Embedding(VOCABULARY, 12)
        self.positions = torch.nn.Parameter(torch.randn(LENGTH, 12))
        self.head = torch.nn.Linear(12, VOCABULARY)
        self.blocks = self.Blocks()
        self.collected: list[torch.Tensor] = []
        if kind == "hook":
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: self.collected.append(output.square().mean()))

    @property
    def layers(self) -> Any:
        return self.blocks.layers

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.collected.clear()
        x, hidden = self.embedding(tokens), []
        if self.kind in ("list", "exit", "deep"):
            for layer in self.layers[: 2 if self.kind == "exit" else 3]:
                x = layer(x)
                hidden.append(x)
            x = x + self.positions
        else:
            x, hidden = self.blocks(x, 3)
        loss = torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        if self.kind == "deep":
            losses = [torch.nn.functional.cross_entropy(self.head(h).flatten(0, 1), targets.flatten()) for h in hidden]
            return loss + sum(losses)
        if self.kind == "aux":
            return loss + sum(layer.aux for layer in self.layers)
        if self.kind == "hook":
            return loss + sum(self.collected)
        return loss + sum(each.std(1).mean() for each in hidden)


COLLECTING: dict[str, Any] = {
    "tp_sequence_parallel": True,
    "tp_plan": {
        **dict.fromkeys(("embedding", "head"), "replicate"), "blocks.layers.*.up": "column",
        "blocks.layers.*.down": "row",
    },
}  # fmt: skip


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["aux", "hook", "returned"])
def test_a_loss_of_what_blocks_compute_of_a_part_of_the_sequence_is_an_error_or_right(kind: str, stage: int) -> None:
    expected = alone(lambda: Collecting(kind), 1)

    def job() -> None:
        engine = initialize(make(lambda: Collecting(kind)), config(stage, 2, parallel=COLLECTING))
        if kind == "returned":
            train(engine, range(STEPS))
            assert_equal(engine.module_state_dict(), expected)
            return
        with pytest.raises(UsageError, match="are of this rank's part of the sequence") as caught:
            train(engine, range(1))
        assert "where: blocks.layers.2.down" in str(caught.value)

    run_ranks(2, job)


@pytest.mark.parametrize("kind", ["list", "exit", "deep"])
def test_a_split_sequence_in_the_module_around_the_layers_is_an_error_before_the_models(kind: str) -> None:
    """The layers' list is the model's own, whose forward reads the hidden states itself."""

    class Flat(Collecting):
        def __init__(self) -> None:
            super().__init__(kind)
            layers = self.blocks.layers
            del self.blocks
            self.list = layers

        @property
        def layers(self) -> Any:
            return self.list

    plan = {name.replace("blocks.layers", "list"): style for name, style in COLLECTING["tp_plan"].items()}

    def job() -> None:
        parallel = {**COLLECTING, "tp_plan": plan}
        engine = initialize(make(Flat), config(1, 2, parallel=parallel))
        what = {
            "list": "part of the sequence",
            "exit": "list.0 was called, and list.2, .* was not called after it",
            "deep": r"Flat raised ValueError: Expected input batch_size .*\. The layers of list split the sequence",
        }
        with pytest.raises(UsageError, match=what[kind]):
            train(engine, range(1))

    run_ranks(2, job)


def test_a_loss_of_the_scripts_own_from_split_logits_is_an_error() -> None:
    def job() -> None:
        engine = initialize(make(gpt), config(1, 2, parallel={"tp_loss_parallel": True}))
        batch = tokens(0, 1)
        logits = engine(batch[:, :-1])
        assert logits.shape[-1] == VOCABULARY // 2
        smoothed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten() % 25)
        with pytest.raises(UsageError, match=r"from this rank's part of the logits(?s:.)*where: head"):
            engine.backward(smoothed)
        own = vocab_parallel_cross_entropy(engine(batch[:, :-1]), batch[:, 1:], engine.axes.comms["tp"], VOCABULARY)
        engine.backward(own)
        engine.step()

    run_ranks(2, job)


def test_batch_norms_between_layers_that_split_the_sequence_are_refused() -> None:
    def job() -> None:
        model = make(lambda: Collecting("aux"))
        model.layers[1].norm = torch.nn.BatchNorm1d(12)
        with pytest.raises(ModelError, match=r"blocks\.layers\.1\.norm is a batch norm"):
            initialize(model, config(1, 2, parallel=COLLECTING))

    run_ranks(2, job)
