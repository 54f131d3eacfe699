"""DeepSpeed's pipeline schedules as data: what one stage does in each step of a batch.

    for instructions in TrainSchedule(micro_batches=8, stages=4, stage_id=1):
        print(instructions)

They describe 1F1B. The engine runs ``shoal.pipeline.schedule``; these are for scripts that print or derive schedules.
A step of stage ``s`` of ``p`` is the forward of micro-batch ``i`` at step ``2 i + s``, and its backward at step
``2 i + 2 p - 1 - s``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class PipeInstruction:
    """One thing that the engine does; equal to another of the same class and arguments."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.kwargs == vars(other)["kwargs"]

    def __hash__(self) -> int:
        return hash(repr(self))


class OptimizerStep(PipeInstruction):
    """Run the optimizer, zero the gradients."""


class ReduceGrads(PipeInstruction):
    """Sum the gradients over the data-parallel ranks."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of tied weights over their stages."""


class BufferOpInstruction(PipeInstruction):
    """One that reads or writes the buffer of a micro-batch."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Read a micro-batch from the data iterator."""


class ForwardPass(BufferOpInstruction):
    """Run the forward."""


class BackwardPass(BufferOpInstruction):
    """Run the backward."""


class SendActivation(BufferOpInstruction):
    """Send the forward's output to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the forward's input from the stage before."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of the input to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the output from the next stage."""


class PipeSchedule(ABC):
    """The instructions of one stage for a batch, step by step. A derived class says which, in ``steps``.

    Sends of a step match receives of the same step on the neighbour, so there may be a barrier between steps.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self._steps = self.steps()

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """The micro-batches that are held at a time."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        self._steps = self.steps()
        return self

    def __next__(self) -> list[PipeInstruction]:
        return next(self._steps)

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % self.num_pipe_buffers()


class TrainSchedule(PipeSchedule):
    """Forwards and backwards in turn (1F1B), then the optimizer."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        num_steps = 2 * (self.micro_batches + self.stages - 1)
        before = -1  # the micro-batch of the last step, which ran in the other direction
        for step in range(num_steps):
            is_forward = (step - self.stage_id) % 2 == 0
            start = self.stage_id if is_forward else 2 * self.stages - 1 - self.stage_id
            now = (step - start) // 2
            has_now, has_before = self._valid_micro_batch(now), self._valid_micro_batch(before)
            instructions: list[PipeInstruction] = []
            if is_forward and self._valid_stage(self.prev_stage):
                instructions += [SendGrad(self._buffer_idx(before))] if has_before else []
                instructions += [RecvActivation(self._buffer_idx(now))] if has_now else []
            if not is_forward and self._valid_stage(self.next_stage):
                instructions += [RecvGrad(self._buffer_idx(now))] if has_now else []
                instructions += [SendActivation(self._buffer_idx(before))] if has_before else []
            if has_now:
                buffer = self._buffer_idx(now)
                if is_forward and (self.is_first_stage or self.is_last_stage):
                    instructions.append(LoadMicroBatch(buffer))
                instructions.append(ForwardPass(buffer) if is_forward else BackwardPass(buffer))
            if step == num_steps - 1:
                instructions += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield instructions
            before = now

    def num_pipe_buffers(self) -> int:
        """The forwards that this stage runs before its first backward; 2 at least."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class InferenceSchedule(PipeSchedule):
    """Forwards only. An output is sent while the next micro-batch is received."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            now = step - self.stage_id
            has_now = self._valid_micro_batch(now)
            is_even = self.stage_id % 2 == 0
            buffer = step % 2 if is_even else (step + 1) % 2
            instructions: list[PipeInstruction] = []
            if has_now and (self.is_first_stage or self.is_last_stage):
                instructions.append(LoadMicroBatch(buffer))
            sends = self._valid_stage(self.next_stage) and self._valid_micro_batch(now - 1)
            send: list[PipeInstruction] = [SendActivation(1 - buffer)] if sends else []
            receives = self._valid_stage(self.prev_stage) and has_now
            receive: list[PipeInstruction] = [RecvActivation(buffer)] if receives else []
            instructions += send + receive if is_even else receive + send  # neighbours in opposite order
            yield [*instructions, ForwardPass(buffer)] if has_now else instructions

    def num_pipe_buffers(self) -> int:
        return 2


class DataParallelSchedule(PipeSchedule):
    """Forward and backward of each micro-batch on one stage, then the optimizer."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches):
            passes: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            yield [*passes, ReduceGrads(), OptimizerStep()] if step == self.micro_batches - 1 else passes

    def num_pipe_buffers(self) -> int:
        return 1
