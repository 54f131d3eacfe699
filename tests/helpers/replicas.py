"""Replicas that are jobs of their own: forked processes, a quorum server in a thread, and what each step has used."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.comm.quorum import QuorumServer
from shoal.comm.threads import run_ranks
from shoal.data import shuffled
from shoal.engine.parts.fault_tolerance import FaultTolerance
from shoal.engine.parts.part import Part
from shoal.running.status import GlobalStatus
from tests.helpers import composition
from tests.helpers.forking import forking
from tests.helpers.links import drop_links

NUM_SAMPLES, ROWS, SEED = 2000, 2, 1


class Samples(torch.utils.data.Dataset[Any]):
    """Random rows, each with its index.

    Args:
        bad: the index of a row that has a NaN.
    """

    def __init__(self, bad: int = -1) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return row * float("nan") if index == self._bad else row, index


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs - 1).square().mean()


class Task:
    """What the replicas train: linear layers."""

    def __init__(self, bad: int = -1) -> None:
        self._bad = bad

    def model(self, seed: int) -> nn.Module:
        return model_of(seed)

    def data(self) -> torch.utils.data.Dataset[Any]:
        return Samples(self._bad)

    def backward(self, engine: shoal.Engine, inputs: torch.Tensor) -> bool:
        """One micro-batch. Returns: True: it is the last one of its step."""
        engine.backward(loss_of(engine(inputs.to(next(engine.module.parameters()).dtype))))
        return engine.is_gradient_accumulation_boundary()

    def step(self, engine: shoal.Engine, *, is_last: bool) -> None:
        engine.step()


class TokenRows(Samples):
    """Random tokens, and the number of the sample."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 53, (9,), generator=generator), index


class Decoder(Task):
    """A small decoder, whose layers, sequence or experts the ranks of a replica divide.

    Args:
        run: of ``tests.helpers.composition.settings_of``.
    """

    def __init__(self, run: composition.Run) -> None:
        self.run = run
        self._waiting: list[tuple[torch.Tensor, ...] | None] = []  # micro-batches of a step of a pipeline

    def model(self, seed: int) -> nn.Module:
        from tests.helpers.composition_runs import Model  # which no other test of replicas needs

        model = Model(self.run)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + seed / 8)
        return model

    def data(self) -> torch.utils.data.Dataset[Any]:
        return TokenRows()

    def backward(self, engine: shoal.Engine, inputs: torch.Tensor | None) -> bool:
        batch = None if inputs is None else self._batch(engine, inputs)
        if self.run.pp > 1:
            self._waiting.append(batch)
            return len(self._waiting) == engine.gradient_accumulation_steps()
        assert batch is not None
        engine.backward(engine(*batch))
        return engine.is_gradient_accumulation_boundary()

    def _batch(self, engine: shoal.Engine, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        context = engine.sequence_context or shoal.SequenceContext()
        whole = inputs[:, :-1], inputs[:, 1:].contiguous(), torch.arange(inputs.shape[1] - 1)
        return tuple(context.shard(each, dim=each.dim() - 1) for each in whole)

    def step(self, engine: shoal.Engine, *, is_last: bool) -> None:
        if self.run.pp == 1:
            engine.step()
        elif is_last:
            engine.train_batch(iter(self._waiting))
            self._waiting.clear()


def settings(stage: int, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 40, "warmup_max_lr": 1e-2}},
        "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "data": {"seed": SEED},
        "log_level": "error",
        **sections,
    }


def digest(engine: shoal.Engine) -> list[int]:
    """Sums of the bits of parameters, and of optimizer state, on this rank."""
    sums = [0, 0]
    shards = engine.sharding.local_shards()
    for number, kind in enumerate((shards.model(), shards.optimizer())):
        for shard in kind:
            for part in shard.part(shard.begin, shard.end):
                bits = part.detach().contiguous().view(torch.int32).long()
                sums[number] += int((bits * torch.arange(1, len(bits) + 1)).sum())
    return sums


def _fail() -> None:
    raise RuntimeError("a fault")


FATES: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "abort": os.abort,
    "leave": lambda: os._exit(0),
    "exit": lambda: os._exit(1),
    "raise": _fail,
    "slow": lambda: time.sleep(0.5),
    "link": drop_links,
}


def _run_replica(
    rank: int, size: int, out: str, port: int, config: dict[str, Any], task: Task, seed: int, fate: str
) -> None:
    torch.set_num_threads(1)
    if size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", init_method=f"file://{out}-store", rank=rank, world_size=size)
    config = {**config, "fault_tolerance": {"quorum": f"127.0.0.1:{port}"}}
    engine, _, loader, _ = shoal.initialize(model=task.model(seed), config=config, training_data=task.data())
    replicas = engine.part(FaultTolerance)
    assert replicas is not None and loader is not None
    stop = Path(out).with_name("stop")
    with open(f"{out}-{rank}.jsonl", "a", buffering=1) as record:
        print(json.dumps({"serial": replicas._link.serial}), file=record)
        num_steps = 0  # of this process

        def die(place: str) -> None:
            at, step, action = (*fate.split(), "kill", "")[:3] if fate else ("", "0", "")
            if (at, int(step)) == (place, num_steps):
                print(f"{fate} now", file=sys.stderr)
                FATES[action]()

        ask, mean, send, receive = replicas._ask, replicas._mean, replicas._send, replicas._peer.receive
        replicas._ask = lambda op, **more: (die(op), ask(op, **more))[1]  # type: ignore[assignment]
        replicas._mean = lambda *args, **more: (die("mean"), mean(*args, **more))[1]  # type: ignore[assignment]
        replicas._send = lambda *args: (die("send"), send(*args))[1]  # type: ignore[assignment]
        replicas._peer.receive = lambda *args: (die("receive"), receive(*args))[1]  # type: ignore[assignment]
        taken: list[int] = []
        for batch in loader:
            inputs, indices = batch or (None, torch.tensor([]))  # a stage in the middle reads nothing
            if stop.exists() and engine.global_steps >= int(stop.read_text()):
                break
            die("forward")
            taken += indices.tolist()
            is_last, serial = task.backward(engine, inputs), replicas._link.serial
            if is_last:
                print(json.dumps({"taken": taken, "serial": serial, "step": engine.global_steps}), file=record)
                taken = []
            task.step(engine, is_last=is_last)
            if is_last:
                done = {
                    "step": engine.global_steps,
                    "contributors": replicas._commit.get("contributors", []),
                    "digest": digest(engine),
                    "loss": engine.accumulation.step_loss,
                    "counters": [engine.global_samples, engine.micro_steps, *engine.get_lr()],
                }
                print(json.dumps(done), file=record)
                num_steps += 1
                die("after")
                time.sleep(0.01)
    engine.destroy()
    os._exit(0)


class Run:
    """A run under way.

    Args:
        size: ranks of one replica.
        num_batch: of them, those that take samples of their own; None: all.
    """

    def __init__(
        self,
        folder: Path,
        num_replicas: int,
        config: dict[str, Any],
        size: int = 1,
        timeout_seconds: float = 30,
        task: Task | None = None,
        num_batch: int | None = None,
    ) -> None:
        self._folder, self._config, self._size = folder, config, size
        self._task, self._num_batch = task or Task(), num_batch or size
        self._context = forking()
        self.server = QuorumServer(0, num_replicas=num_replicas, timeout_seconds=timeout_seconds)
        self._thread = threading.Thread(target=self.server.serve, daemon=True)
        self._thread.start()
        self.processes: list[list[Any]] = []

    def start(self, fate: str = "") -> int:
        """Start a replica, whose last rank fails as ``fate`` says, once it has taken so many steps: "forward 3",
        "mean 0 stop". Returns: its number.
        """
        number = len(self.processes)
        out = str(self._folder / f"replica-{number}")
        fates = [""] * (self._size - 1) + [fate]
        self.processes.append(
            [
                self._context.Process(
                    target=_run_replica,
                    # Another seed: what a replica starts from is replaced.
                    args=(rank, self._size, out, self.server.port, self._config, self._task, number, fates[rank]),
                )
                for rank in range(self._size)
            ]
        )
        for process in self.processes[number]:
            process.start()
        return number

    def wait_for(self, what: Callable[[], bool], seconds: float = 60.0, *, any_may_end: bool = False) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"not within {seconds} s: {self.steps(0)[-1:]}"
            codes = [{process.exitcode for process in replica} for replica in self.processes]
            # The other rank of one that was killed may have seen that, and failed.
            is_orderly = all(-signal.SIGKILL in of_one or of_one <= {None, 0} for of_one in codes)
            assert any_may_end or is_orderly, codes
            time.sleep(0.02)

    def wait_until_dead(self, number: int) -> None:
        """One rank has killed itself. The launcher of a replica ends the others."""
        self.wait_for(lambda: self.has_ended(number))
        self.end(number)

    def has_ended(self, number: int) -> bool:
        """True if a rank of the replica has."""
        return any(process.exitcode is not None for process in self.processes[number])

    def end(self, number: int) -> None:
        processes = self.processes[number]
        for process in processes:
            process.kill()
            process.join()

    def _lines(self, number: int, rank: int = 0) -> list[dict[str, Any]]:
        path = self._folder / f"replica-{number}-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self, number: int, rank: int = 0) -> list[dict[str, Any]]:
        """The steps that a replica has taken."""
        return [line for line in self._lines(number, rank) if "digest" in line]

    def taken(self) -> dict[tuple[int, int, int], list[int]]:
        """The samples by the number of the step, by the serial of the replica, by rank."""
        return {
            (line["step"], line["serial"], rank): line["taken"]
            for number in range(len(self.processes))
            for rank in range(self._size)
            for line in self._lines(number, rank)
            if "taken" in line
        }

    def stop(self, numbers: list[int]) -> None:
        """Let all stop some steps after the present one."""
        last = max(self.steps(number)[-1]["step"] for number in numbers)
        path = self._folder / "stop"
        path.with_suffix(".new").write_text(str(last + 8))
        path.with_suffix(".new").replace(path)
        for number in numbers:
            for process in self.processes[number]:
                process.join(30)
                assert process.exitcode == 0, (number, process.exitcode)

    def close(self) -> None:
        for process in [process for replica in self.processes for process in replica]:
            process.kill()
            process.join()
        self.server.close()
        self._thread.join()

    # what must hold

    def used(self, number: int = 0, every: int = 1) -> list[list[int]]:
        """Of each step, what its contributors took, in order.

        Args:
            every: steps of a round, all of which a synchronisation at its end uses.
        """
        taken, steps = self.taken(), self.steps(number)
        contributors = {line["step"]: line["contributors"] for line in steps if line["step"] % every == 0}
        return [
            [
                index
                for serial in contributors[-(-line["step"] // every) * every]
                for rank in range(self._num_batch)
                for index in taken[line["step"] - 1, serial, rank]
            ]
            for line in steps
            if line["step"] <= max(contributors)
        ]

    def seed(self) -> int:
        """Of the replica that connected first, from whose parameters all start."""
        serials = {
            number: lines[0]["serial"] for number in range(len(self.processes)) if (lines := self._lines(number))
        }
        return min(serials, key=lambda number: serials[number])

    def check_samples(self, every: int = 1) -> None:
        """No sample is lost, and none is used twice."""
        used = [index for of_step in self.used(every=every) for index in of_step]
        order = shuffled(range(NUM_SAMPLES), NUM_SAMPLES, SEED, 0).tolist()
        assert sorted(used) == sorted(order[: len(used)])

    def check_alike(self, numbers: list[int], every: int = 1) -> None:
        """Replicas have the same bits after each step, and the same counters and schedule.

        Args:
            every: after so many steps, their parameters alone.
        """
        for rank in range(self._size):
            first = {line["step"]: line for line in self.steps(0, rank)}
            for number in numbers:
                for line in self.steps(number, rank):
                    if every == 1:
                        assert line == first[line["step"]], (number, rank)
                    elif line["step"] % every == 0 and line["step"] in first:
                        same = first[line["step"]]
                        assert line["digest"][0] == same["digest"][0] and line["counters"] == same["counters"]


def lose_and_replace_the_second(run: Run) -> int:
    """The second of two replicas is killed in the mean of its fourth step; another one joins, with the same bits.

    Returns: the number of the first one, which has gone on.
    """
    first, second = run.start(), run.start("mean 3")
    run.wait_until_dead(second)
    third = run.start()
    run.wait_for(lambda: len(run.steps(third)) > 3)
    run.stop([first, third])
    run.check_samples()
    run.check_alike([second, third])
    counts = [len(line["contributors"]) for line in run.steps(first)]
    assert counts[:4] == [2, 2, 2, 1] and counts[-1] == 2
    return first


@contextmanager
def running(folder: Path, num_replicas: int, config: dict[str, Any], size: int = 1, **options: Any) -> Iterator[Run]:
    run = Run(folder, num_replicas, config, size, **options)
    try:
        yield run
    finally:
        run.close()


class Mean(Part):
    """The sum over the replicas' micro-batches, in their order, becomes their mean as the replicas form it."""

    def prepare(self, engine: Any) -> None:
        self._engine = engine

    @torch.no_grad()
    def at_reduction(self, status: GlobalStatus) -> GlobalStatus:
        sharding = self._engine.sharding
        for group in sharding.groups:
            group.gradient.owned().mul_(1 / self._engine.gradient_accumulation_steps())
        return replace(status, norm=sharding.synchronize_status(None).norm)


def trained_alone(run: Run, stage: int) -> list[tuple[list[int], float]]:
    """Of each step of one rank that uses the samples of a run: the digest, and the loss."""
    engine, *_ = shoal.initialize(model=model_of(run.seed()), config=settings(stage), parts=[Mean()])
    data, results = Samples(), []
    for indices in run.used():
        engine.set_train_batch_size(len(indices))
        for start in range(0, len(indices), ROWS):
            inputs = torch.stack([data[index][0] for index in indices[start : start + ROWS]])
            engine.backward(loss_of(engine(inputs)), scale_wrt_gas=False)
            engine.step()
        results.append((digest(engine), engine.accumulation.step_loss or 0.0))
    engine.destroy()
    return results


def trained_in_one_job(run: Run) -> list[list[tuple[list[int], float]]]:
    """Of each rank of one job of a replica's layout, and of each step: the digest, and the loss.

    A micro-batch of the job is one of each rank of a replica; the replicas' follow one another, in their order.
    """
    task, seed, used = run._task, run.seed(), run.used()
    width = ROWS * run._num_batch

    def job() -> list[tuple[list[int], float]]:
        engine, *_ = shoal.initialize(model=task.model(seed), config=run._config)
        mine, data, results = copy.deepcopy(task), task.data(), []
        first = engine.axes.batch.rank * ROWS
        for indices in used:
            engine.set_train_batch_size(len(indices))
            for start in range(first, len(indices), width):
                inputs = torch.stack([data[index][0] for index in indices[start : start + ROWS]])
                mine.step(engine, is_last=mine.backward(engine, inputs))
            results.append((digest(engine), engine.accumulation.step_loss or 0.0))
        engine.destroy()
        return results

    found: list[list[tuple[list[int], float]]] = run_ranks(run._size, job)
    return found
