"""Trains one case with Shoal, on ranks that are threads, and in plain PyTorch; and says what came out.

equal    losses, norms and parameters are those of plain PyTorch, within the bounds
refused  one of Shoal's own errors
warned   other numbers, or another error, and a warning of Shoal that names what does not fit
wrong    other numbers
crash    any other exception
hang     ranks waited for each other, or for nothing
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import re
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.comm.quorum import QuorumServer
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import RankFailedError, ShoalError
from tests.helpers import reference
from tests.helpers.compiling import CountsGraphs, compiling
from tests.search import models
from tests.search.cases import STEPS, Case, complete, config, optimizer_options, world_size

# Of a parameter's movement (the norm of its difference, by the norm of what it moved); what is computed wrongly differs
# by 1e-2 and more. In 16 bits activations, and so gradients, are rounded; a gradient that is a small difference of
# large numbers may be all rounding, so a movement counts as at least the mean one of the model.
MOVEMENT = {"fp32": 2e-3, "bf16": 0.15, "fp16": 0.05, "autocast": 0.15}
LOSS = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 3e-3, "autocast": 2e-2}
NORM = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 1e-2, "autocast": 5e-2}
LEAST_MOVEMENT = 1e-4  # of an element, below which its error is compared with this
SECONDS = 60.0  # for the ranks of one case


class WrongError(Exception):
    """Ranks do not agree."""


@dataclass
class Outcome:
    kind: str
    what: str = ""
    details: str = field(default="", repr=False)


class _Warnings(logging.Handler):
    """What the engine says of models that do not fit a layout."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(("each rank of ", "tensor parallelism: ")):
            self.texts.append(text)


def run(case: Case) -> Outcome:
    """The outcome of a case; options may be lacking."""
    full = complete(case)
    if full is None:
        return Outcome("refused", "no case")
    logger, handler = logging.getLogger("shoal"), _Warnings()
    logger.addHandler(handler)
    try:
        outcome = _run(full)
    finally:
        logger.removeHandler(handler)
    if outcome.kind in ("wrong", "crash") and handler.texts:
        return Outcome("warned", handler.texts[0])
    return outcome


def _run(full: Case) -> Outcome:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            start = models.build(full["model"], lora=full["lora"])
            expected = alone(full, start)
            found = over_ranks(full, start, folder)
            outcome = compare(full, start, found, expected)
            if (
                outcome.kind == "wrong"
                and full["precision"] != "fp32"
                and expected.parameters.keys() == found.parameters.keys()
            ):
                exact = alone({**full, "precision": "fp32"}, start)
                return outcome if _is_less_exact(found, expected, exact) else Outcome("equal", "as far from fp32")
            return outcome
        except ShoalError as error:
            text = f"{error.code}: {error}"
            # A pipeline tells every rank what one of them raised, which need not be an error of Shoal's.
            raised = re.search(r" raised (\w+)", error.what) if error.code == "pipeline-failed" else None
            if raised is not None and not hasattr(shoal.errors, raised[1]):
                return Outcome("crash", text, traceback.format_exc())
            if isinstance(error, RankFailedError) or error.code.startswith(("rank-", "comm-mismatch", "comm-conn")):
                return Outcome("crash", text, traceback.format_exc())
            return Outcome("hang" if error.code.startswith("comm") else "refused", text, traceback.format_exc())
        except WrongError as error:
            return Outcome("wrong", str(error))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {str(error)[:300]} ({Path(place.filename).name}:{place.name})"
            return Outcome("crash", text, traceback.format_exc())
        finally:
            gc.collect()


def phases(case: Case) -> list[tuple[Case, range]]:
    """The layouts of a case, and the steps that each trains."""
    if not case["then"]:
        return [(case, range(STEPS))]
    after = complete({**case, **case["then"], "then": None, "between": "nothing"})
    assert after is not None
    return [({**case, "then": None}, range(2)), (after, range(2, STEPS + 1))]


def micro_batch(case: Case, step: int, micro: int, rank: int) -> models.Batch:
    """What data-parallel rank ``rank`` trains on, of the whole sequence."""
    over_sequence = case["sp"] * case["cp"] > 1
    family = models.FAMILIES[case["model"]]
    has_positions = family.config is None or case["packed"] or (over_sequence and family.takes_positions)
    index = 1000 * step + 100 * micro + rank
    found = models.batch(
        case["model"],
        index,
        ragged=case["ragged"],
        padded=case["padded"],
        has_positions=has_positions,
        packed=case["packed"],
    )
    if family.options.get("is_late") and step > 0:
        found["late"] = torch.ones(())
    return found


def alone(case: Case, model: nn.Module) -> reference.Trained:
    steps = [
        [
            micro_batch(layout, step, micro, rank)
            for micro in range(layout["accumulation"])
            for rank in range(layout["dp"])
        ]
        for layout, numbers in phases(case)
        for step in numbers
    ]
    precision = case["precision"]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    if case["built"] == "zero.Init":  # it makes the parameters in the config's dtype
        model = copy.deepcopy(model).to(dtype).float()
    return reference.train(
        model,
        steps,
        models.loss_of,
        lambda parameters: client(case, parameters),
        count=lambda inputs: int((models.targets(case["model"], inputs) != models.IGNORED).sum()),
        numbers=reference.Numbers(
            dtype=dtype,
            autocast=torch.bfloat16 if precision == "autocast" else None,
            scale=128.0 if precision == "fp16" else 1.0,
            clip=case["clip"],
            by_tokens=case["by_tokens"],
        ),
    )


def client(case: Case, parameters: Any) -> torch.optim.Optimizer:
    kind = case["optimizer"]
    if kind.startswith("client"):
        kind = "AdamW"
    if case["optimizer"] == "client groups":  # as trainers make them: vectors do not decay
        parameters = list(parameters)
        vectors = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02}
        parameters = [{"params": [p for p in parameters if p.dim() >= 2]}, vectors]
        parameters = [group for group in parameters if group["params"]]
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(parameters, **optimizer_options(case))
    return made


def over_ranks(case: Case, start: nn.Module, folder: str) -> reference.Trained:
    """The losses and norms of rank 0, which all ranks have, and the parameters of all ranks."""
    if case["attention"] == "shoal":
        from shoal.parallel.sequence.huggingface import register

        register()
    if case["built"] == "meta":
        import transformers

        transformers.utils.logging.disable_progress_bar()
        start.save_pretrained(f"{folder}/weights")  # type: ignore[operator]
    result = reference.Trained()
    for number, (layout, steps) in enumerate(phases(case)):
        made = [_made(layout, start) for _ in range(world_size(layout))]

        def job(
            quorum: QuorumServer | None,
            layout: Case = layout,
            steps: range = steps,
            made: list[Any] = made,
            is_later: bool = number > 0,
        ) -> Any:
            # Autocast has one cache for all threads, which a rank empties when its forward ends.
            torch.set_autocast_cache_enabled(False)
            rank = _Rank(layout, made[current_world().rank], folder, quorum)
            if is_later:
                rank.load()
            rank.train(steps)
            if case["then"] and not is_later:
                rank.save()
            rank.finish()
            return rank

        slow = 3.0 if layout["compiled"] else 1.0
        with _quorum(layout) as quorum, _compiling(layout):
            found = run_ranks(
                world_size(layout), partial(job, quorum), timeout=slow * SECONDS, wait_timeout=slow * 20.0
            )
        result.parameters = _together([each.parameters for each in found])
        sums = torch.stack([torch.stack(each.sums) for each in found]).sum(0)
        result.losses += (sums[:, 0] / sums[:, 1]).tolist()
        result.norms += found[0].norms
        if any(each.norms != found[0].norms for each in found):
            raise WrongError(f"ranks have different norms: {[each.norms for each in found]}")
    return result


@contextmanager
def _quorum(case: Case) -> Iterator[QuorumServer | None]:
    """The server of a run that is the only replica."""
    if case["watch"] != "replica":
        yield None
        return
    server = QuorumServer(0)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


@contextmanager
def _compiling(case: Case) -> Iterator[None]:
    """Without code generation, which takes minutes on a CPU."""
    if not case["compiled"]:
        yield
        return
    compile_ = torch.compile
    backend = CountsGraphs("aot_eager")
    torch.compile = lambda function, *, mode: compile_(function, backend=backend, dynamic=False)  # type: ignore
    try:
        with compiling():
            yield
    finally:
        torch.compile = compile_
    if backend.num_graphs == 0:
        raise WrongError("nothing was compiled")


def _together(found: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    parameters: dict[str, torch.Tensor] = {}
    for rank, each in enumerate(found):
        for name, value in each.items():
            if name in parameters and not torch.equal(parameters[name], value):
                far = float((parameters[name] - value).abs().max())
                raise WrongError(f"rank {rank} ends with another {name} than a rank before it, by {far:.2g}")
            parameters[name] = value
    return parameters


def _made(case: Case, start: nn.Module) -> Any:
    """A rank's model."""
    attention = {"shoal": "shoal", "exact": None}[case["attention"]]
    if case["built"] == "meta":
        family = models.FAMILIES[case["model"]]
        with torch.device("meta"):
            return models.skeleton(case["model"], start, attention or family.exact)
    model: Any = copy.deepcopy(start)
    if attention:
        (model.get_base_model() if case["lora"] else model).set_attn_implementation(attention)
    if models.FAMILIES[case["model"]].config is None and case["sp"] * case["cp"] > 1:
        for block in model.blocks:
            block.attention = shoal.attention
    return model


class _Rank:
    """One rank's engine; of each step the loss times its weight and the weight, and the norm; the parameters."""

    def __init__(self, case: Case, model: Any, folder: str, quorum: QuorumServer | None) -> None:
        self.case, self.model, self.folder, self.quorum = case, model, folder, quorum
        self.sums: list[torch.Tensor] = []
        self.norms: list[float] = []
        self.parameters: dict[str, torch.Tensor] = {}
        self.engine = self.start(model)

    def start(self, model: Any, *, is_again: bool = False) -> Any:
        """An engine; ``is_again``: of a model that an engine before had."""
        case = self.case
        settings = config(case, self.folder)
        if self.quorum is not None:
            settings["fault_tolerance"] = {"quorum": f"127.0.0.1:{self.quorum.port}"}
        if case["built"] == "zero.Init" and not is_again:
            whole = model
            with shoal.zero.Init(config_dict_or_path=settings):
                model = models.skeleton(case["model"], whole, None)
                with shoal.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
                    for mine, value in zip(model.parameters(), whole.parameters(), strict=True):
                        mine.copy_(value)
        if case["recompute"] == "model" and not is_again:
            model.gradient_checkpointing_enable()
            if case["lora"]:
                model.enable_input_require_grads()
        optimizer = None
        if case["optimizer"].startswith("client"):
            optimizer = client(case, [p for p in model.parameters() if p.requires_grad])
        engine = shoal.initialize(model=model, optimizer=optimizer, config=settings)[0]
        if case["built"] == "meta" and not is_again:
            shoal.load_hf(engine.module, f"{self.folder}/weights")
        return engine

    def load(self) -> None:
        self.engine.load_checkpoint(f"{self.folder}/checkpoint", tag="middle")

    def save(self) -> None:
        self.engine.save_checkpoint(f"{self.folder}/checkpoint", tag="middle")

    def train(self, steps: range) -> None:
        for step in steps:
            micro = range(self.case["accumulation"])
            if self.case["pp"] > 1:
                loss = self.engine.train_batch(iter([self.inputs(step, index) for index in micro]))
                sums = torch.stack([loss.double(), torch.ones_like(loss).double()])
            else:
                with self.coalescing():
                    sums = torch.stack([self.micro_step(step, index) for index in micro]).sum(0)
                if self.case["passes"] in ("coalesced", "unmanaged"):
                    self.engine.step()
            self.sums.append(sums)
            self.norms.append(float(self.engine.get_global_grad_norm() or math.nan))
            if step == steps[0]:
                getattr(self, self.case["between"])()

    def finish(self) -> None:
        """Take the parameters, and end the engine."""
        access = self.engine.access
        for name, parameter in self.engine.module.named_parameters():
            if parameter.requires_grad and access.knows(parameter):
                self.parameters[name] = access.full_parameter(parameter).float().clone()
        self.engine.destroy()

    def coalescing(self) -> AbstractContextManager[object]:
        """Around the micro-batches of a step."""
        if self.case["passes"] != "coalesced":
            return nullcontext()
        self.engine.set_gradient_accumulation_boundary(True)
        coalescing: AbstractContextManager[object] = self.engine.coalesce_grad_reduction()
        return coalescing

    def micro_step(self, step: int, micro: int) -> torch.Tensor:
        """The loss times its weight, and the weight. Shape: [2]."""
        inputs, passes = self.inputs(step, micro), self.case["passes"]
        count = (self.targets(inputs) != models.IGNORED).sum()
        tokens = {"num_tokens": count} if self.case["by_tokens"] else {}
        is_last = micro == self.case["accumulation"] - 1
        if passes == "boundaries":
            self.engine.set_gradient_accumulation_boundary(is_last)
        skips = not is_last if passes == "no_sync" else passes == "mixed" and micro % 2 == 1
        with self.engine.no_sync() if skips else nullcontext():
            loss = models.loss_of(self.engine, inputs)
            if passes == "scaled":
                self.engine.scale(loss, **tokens).backward()
            else:
                self.engine.backward(loss, **tokens)
        if passes not in ("coalesced", "unmanaged"):
            self.engine.step()
        weight = count.double() if self.case["by_tokens"] else torch.ones((), dtype=torch.float64)
        return torch.stack([loss.detach().double() * weight, weight])

    def inputs(self, step: int, micro: int) -> models.Batch:
        """This rank's part of its micro-batch."""
        whole = micro_batch(self.case, step, micro, self.engine.axes.batch.rank)
        context = self.engine.sequence_context
        if self.case["sp"] * self.case["cp"] == 1:
            return whole
        family = models.FAMILIES[self.case["model"]]
        if family.auto == "AutoModelForSeq2SeqLM":
            whole["decoder_input_ids"] = whole["labels"].roll(1, -1).masked_fill(torch.arange(models.LENGTH) == 0, 1)
        elif family.is_shifted and family.config is not None:
            whole["shift_labels"] = models.targets(self.case["model"], whole)
        return {name: context.shard(value) if value.dim() > 1 else value for name, value in whole.items()}

    def targets(self, inputs: models.Batch) -> torch.Tensor:
        found = inputs.get("shift_labels")
        return models.targets(self.case["model"], inputs) if found is None else found

    def nothing(self) -> None:
        return

    def evaluate(self) -> None:
        if self.case["pp"] > 1:
            self.engine.eval_batch(iter([self.inputs(99, 0)]), num_micro_batches=1)
            return
        self.engine.eval()
        with torch.no_grad():
            self.engine(**self.inputs(99, 0))
        self.engine.train()

    def offload_states(self) -> None:
        self.engine.offload_states()
        self.engine.reload_states()

    def resume(self) -> None:
        self.save()
        self.load()

    resume_async = resume

    def restart(self) -> None:
        """Go on in another engine of the same model."""
        self.save()
        module = self.engine.module
        self.engine.destroy()
        self.engine = self.start(module, is_again=True)
        self.load()

    def error(self) -> None:
        """A batch that the model cannot take; the step is run again with a right one."""
        bad = self.inputs(99, 0)
        bad["input_ids"] = bad["input_ids"] + 10 * models.VOCABULARY
        try:
            self.engine(**bad)
        except IndexError:
            return
        raise WrongError("tokens outside of the vocabulary are taken")


def compare(case: Case, start: nn.Module, found: reference.Trained, expected: reference.Trained) -> Outcome:
    precision = case["precision"]
    # Which experts a token uses may change by rounding.
    slack = 6.0 if precision != "fp32" and models.FAMILIES[case["model"]].has_experts else 1.0
    missing = expected.parameters.keys() ^ found.parameters.keys()
    if missing:
        return Outcome("wrong", f"names of parameters differ: {sorted(missing)[:4]}")
    for what, bounds in (("losses", LOSS), ("norms", NORM)):
        mine, theirs = getattr(found, what), getattr(expected, what)
        if not all(abs(a - b) <= slack * bounds[precision] * abs(b) for a, b in zip(mine, theirs, strict=True)):
            return Outcome("wrong", f"{what} {_text(mine)} in place of {_text(theirs)}")
    before = dict(start.named_parameters())
    changes = torch.cat([(value - before[name]).flatten() for name, value in expected.parameters.items()])
    least = LEAST_MOVEMENT if precision == "fp32" else changes.square().mean().sqrt().item()
    worst, worst_name = 0.0, ""
    for name, value in expected.parameters.items():
        error = (found.parameters[name] - value).norm().item()
        moved = max((value - before[name]).norm().item(), least * value.numel() ** 0.5)
        far = error / moved if error == error else math.inf
        if far > worst:
            worst, worst_name = far, name
    if worst > slack * MOVEMENT[precision]:
        return Outcome("wrong", f"{worst_name} is {worst:.2g} of its movement away")
    return Outcome("equal", f"{worst:.1g}")


def _is_less_exact(found: reference.Trained, expected: reference.Trained, exact: reference.Trained) -> bool:
    """True if a 16-bit run is more than twice as far from fp32 as plain PyTorch's run in these 16 bits.

    Some shapes lose more in 16 bits than the bounds allow, in plain PyTorch too.
    """
    for what in ("losses", "norms"):
        far, plain = (
            max(abs(a - b) / abs(b) for a, b in zip(getattr(run, what), getattr(exact, what), strict=True))
            for run in (found, expected)
        )
        if not far <= 2 * plain:
            return True
    far, plain = (
        sum((run.parameters[name] - value).square().sum().item() for name, value in exact.parameters.items())
        for run in (found, expected)
    )
    return not far <= 4 * plain


def _text(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values) + "]"
