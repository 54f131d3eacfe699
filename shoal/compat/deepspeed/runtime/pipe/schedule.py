"""``deepspeed.runtime.pipe.schedule``: what a stage does when; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_class

_DO = "pipeline parallelism is not built yet: train the same layers as one nn.Sequential with ZeRO stage 3."

PipeSchedule = absent_class("deepspeed.runtime.pipe.schedule.PipeSchedule", _DO)
InferenceSchedule = absent_class("deepspeed.runtime.pipe.schedule.InferenceSchedule", _DO)
TrainSchedule = absent_class("deepspeed.runtime.pipe.schedule.TrainSchedule", _DO)
DataParallelSchedule = absent_class("deepspeed.runtime.pipe.schedule.DataParallelSchedule", _DO)
PipeInstruction = absent_class("deepspeed.runtime.pipe.schedule.PipeInstruction", _DO)
OptimizerStep = absent_class("deepspeed.runtime.pipe.schedule.OptimizerStep", _DO)
ReduceGrads = absent_class("deepspeed.runtime.pipe.schedule.ReduceGrads", _DO)
ReduceTiedGrads = absent_class("deepspeed.runtime.pipe.schedule.ReduceTiedGrads", _DO)
BufferOpInstruction = absent_class("deepspeed.runtime.pipe.schedule.BufferOpInstruction", _DO)
LoadMicroBatch = absent_class("deepspeed.runtime.pipe.schedule.LoadMicroBatch", _DO)
ForwardPass = absent_class("deepspeed.runtime.pipe.schedule.ForwardPass", _DO)
BackwardPass = absent_class("deepspeed.runtime.pipe.schedule.BackwardPass", _DO)
SendActivation = absent_class("deepspeed.runtime.pipe.schedule.SendActivation", _DO)
RecvActivation = absent_class("deepspeed.runtime.pipe.schedule.RecvActivation", _DO)
SendGrad = absent_class("deepspeed.runtime.pipe.schedule.SendGrad", _DO)
RecvGrad = absent_class("deepspeed.runtime.pipe.schedule.RecvGrad", _DO)

__all__ = [
    "BackwardPass",
    "BufferOpInstruction",
    "DataParallelSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
]
