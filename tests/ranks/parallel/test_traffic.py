"""What an engine's step issues on the axes of the model, beside every ZeRO stage: the counts and bytes of the papers.

tensor parallel    Megatron-LM (arXiv:1909.08053), section 3: 2 all-reduces forward and 2 backward a layer, of bsh
sequence parallel  Korthikanti et al. (arXiv:2205.05198), section 4.2.2: these in halves; 2 inputs gathered again
Ulysses            arXiv:2309.14509, section 3.2: all-to-alls of query, key, value and output, bsh / P each, 4 a
                   pass; here those of query, key and value are one
ring               arXiv:2310.01889: P - 1 times the keys and values, forward and backward; in backward, where a
                   rank has not kept them, P - 1 times their gradients as well
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.recorder import Entry
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.models.gpt import GPT, GPTConfig
from tests.helpers.training import config, make, sgd

ROWS, LENGTH, HIDDEN, LAYERS = 2, 16, 32, 3
STREAM = 4 * ROWS * LENGTH * HIDDEN  # bytes of bsh
Calls = Counter[tuple[str, bool]]  # by the operation, and whether it is backward's


def gpt() -> GPT:
    model = GPT(GPTConfig(64, LENGTH, LAYERS, HIDDEN, 4, tied=False))
    model.attend_by(shoal.attention)
    return model


def step(parallel: dict[str, Any], stage: int, more: dict[str, Any]) -> list[Entry]:
    """What one step issues for the layers: of attention and of split layers, without ZeRO's collectives."""
    model = make(gpt)
    engine = shoal.initialize(
        model=model, optimizer=sgd(model.parameters()), config=config(stage, parallel=parallel, **more)
    )[0]
    context = engine.sequence_context or shoal.SequenceContext()
    tokens = context.shard(torch.arange(ROWS * LENGTH).view(ROWS, LENGTH))
    positions = context.positions(LENGTH, tokens.device)
    with current_world().recorder.recording() as entries:
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(tokens, tokens, positions))
            engine.step()
    engine.destroy()
    labels = ("attention: ", *(f"blocks.{index}.{part}" for index in range(LAYERS) for part in ("att", "feed")))
    return [entry for entry in entries if entry.label.startswith(labels) and not entry.label.endswith("norm.weight")]


def issued(entries: list[Entry]) -> tuple[Calls, Calls]:
    """Calls and bytes received."""
    calls, nbytes = Calls(), Calls()
    for entry in entries:
        key = entry.op, entry.label.endswith(("backward", "gradients"))
        calls[key] += 1
        nbytes[key] += entry.nbytes
    return calls, nbytes


ALL_REDUCES = {("all_reduce", False): 2, ("all_reduce", True): 2}
HALVES = {
    ("all_gather", False): 2, ("reduce_scatter", False): 2, ("all_gather", True): 2 + 2, ("reduce_scatter", True): 2,
}  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("splits_sequence", [False, True])
def test_tensor_parallel_layers_issue_megatrons_collectives(splits_sequence: bool, stage: int) -> None:
    tp = 2
    a_layer = HALVES if splits_sequence else ALL_REDUCES
    of_a_call = STREAM * (tp - 1) // tp * (1 if splits_sequence else 2)
    for entries in run_ranks(tp * 2, step, {"tp": tp, "tp_sequence_parallel": splits_sequence}, stage, {}):
        calls, nbytes = issued(entries)
        assert {entry.axis for entry in entries} == {"tp"}
        assert calls == {key: number * LAYERS for key, number in a_layer.items()}
        assert nbytes == {key: number * LAYERS * of_a_call for key, number in a_layer.items()}


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (3, 2)])
def test_ulysses_moves_four_times_the_activations_of_a_rank_a_pass(stage: int, accumulation: int) -> None:
    sp = 4
    times = LAYERS * accumulation
    a_pass = 4 * STREAM // sp * (sp - 1) // sp
    for entries in run_ranks(sp, step, {"sp": sp}, stage, {"gradient_accumulation_steps": accumulation}):
        calls, nbytes = issued(entries)
        assert {entry.axis for entry in entries} == {"sp"}
        assert calls == {("all_to_all", False): 2 * times, ("all_to_all", True): 2 * times}
        assert nbytes == {("all_to_all", False): a_pass * times, ("all_to_all", True): a_pass * times}


@pytest.mark.parametrize(("stage", "recompute"), [(0, False), (3, True)])
def test_a_ring_passes_keys_and_values_one_time_less_than_there_are_ranks(stage: int, recompute: bool) -> None:
    cp = 4
    more = {"activation_checkpointing": {"modules": ["Block"]}} if recompute else {}
    times = LAYERS * (cp - 1)
    forward = 2 if recompute else 1
    keys_and_values = 2 * STREAM // cp
    for entries in run_ranks(cp, step, {"cp": cp}, stage, more):
        calls, nbytes = issued([entry for entry in entries if not entry.label.endswith("gradients")])
        assert {entry.axis for entry in entries} == {"cp"}
        assert calls == {(op, late): times * (1 if late else forward) for op in ("send", "recv") for late in (0, 1)}
        assert nbytes["recv", False] == forward * nbytes["recv", True] == forward * times * keys_and_values
        of_gradients = [entry.nbytes for entry in entries if entry.label.endswith("gradients") and entry.op == "recv"]
        assert of_gradients == [keys_and_values] * times


def test_the_axes_together_issue_what_each_issues_of_its_part() -> None:
    for entries in run_ranks(8, step, {"tp": 2, "sp": 2, "cp": 2}, 3, {}):
        by_axis = {axis: issued([entry for entry in entries if entry.axis == axis]) for axis in ("tp", "sp", "cp")}
        calls, nbytes = by_axis["tp"]
        assert calls == {key: number * LAYERS for key, number in ALL_REDUCES.items()}
        assert set(nbytes.values()) == {2 * LAYERS * (STREAM // 4)}
        calls, nbytes = by_axis["sp"]
        assert calls == {("all_to_all", late): 2 * LAYERS for late in (False, True)}
        assert set(nbytes.values()) == {LAYERS * 4 * (STREAM // 8) // 2}
        calls, nbytes = by_axis["cp"]
        assert (calls["send", False], calls["send", True]) == (LAYERS, 2 * LAYERS)
        assert nbytes["recv", False] == LAYERS * 2 * STREAM // 8
