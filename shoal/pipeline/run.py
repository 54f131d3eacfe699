"""Runs one rank's actions of a schedule: micro-batches go through the stages, gradients come back.

    RECV_F  begin to receive what the stage before returned        SEND_F  send what this stage returned
    F       run the stage; the last one computes the loss
    RECV_B  begin to receive the gradient of what was sent         SEND_B  send the gradient of what was received
    B       back-propagate; or I: to the inputs alone, and later W: to the weights alone
    UNSHARD, RESHARD, REDUCE_GRAD: the engine gathers, releases and reduces the units of a stage

The engine is behind ``StageCompute``: nothing here knows of ZeRO, and a unit knows nothing of schedules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from shoal.comm.fake import FakeStages
from shoal.comm.formats import WireFormat
from shoal.comm.protocol import Communicator
from shoal.errors import CommError, UsageError
from shoal.pipeline.messages import Channel, Incoming, MessageForm, flatten, unflatten
from shoal.pipeline.schedule import Action
from shoal.pipeline.timeline import TimedAction
from shoal.streams import is_accelerator


class StageCompute(Protocol):
    """What the engine does for a schedule. Each call is of one stage."""

    def forward(self, stage: int, received: Any, batch: Any) -> Any:
        """The stage's forward."""
        ...

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        """The loss of a micro-batch, in training scaled for backward."""
        ...

    def backward(self, run: Callable[[], None], stage: int, *, is_weight_pass: bool = False) -> None:
        """Run a backward pass. In a weight pass no hook gathers the stage's units."""
        ...

    def weights(self, stage: int) -> Iterable[nn.Parameter]:
        """The stage's parameters that require a gradient."""
        ...

    def unshard(self, stage: int) -> None:
        """Gather the stage's units and keep them gathered."""
        ...

    def reshard(self, stage: int) -> None:
        """Release them."""
        ...

    def reduce(self, stage: int) -> None:
        """The stage's last backward of the step is done: its units may be reduced."""
        ...


_TRANSFERS = ("SEND_F", "SEND_B", "RECV_F", "RECV_B")
_FAILED = MessageForm(["failed", None], ())  # sent in place of a structure that no stage will know


@dataclass
class MicroBatch:
    """One micro-batch on this rank.

    Args:
        signature: the same on all stages; see ``messages``.
    """

    data: Any
    signature: int


@dataclass
class _Visit:
    """One micro-batch in one stage, from its forward to its backward."""

    inputs: list[torch.Tensor] = field(default_factory=list)  # leaves that require a gradient, in order
    input_form: MessageForm | None = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    output_form: MessageForm | None = None
    weight_groups: Any = None  # between I and W
    weights_left: Any = None  # edges, their gradients, and weights that no group has
    input_gradients: list[torch.Tensor | None] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """The first error of a run on this rank."""

    action: str
    error: Exception | None  # None: a stage before failed


class PipelineRun:
    """Runs schedules on one rank.

    Args:
        comm: the ranks along ``pp``.
        gradients: the same ranks; gradients are sent over it.
        stages: of this rank.
        num_stages: of the whole model.
        rank_of: the coordinate on ``pp`` of the rank that has a stage.
        goes_on: after an error, go on with the sends and receives of the schedule, so that the other stages reach its
            end too; False: raise at once.
        fake_stages: of a dry run.
        wire: the format of activations and their gradients; see ``Channel``.
    """

    def __init__(
        self,
        comm: Communicator,
        gradients: Communicator,
        compute: StageCompute,
        device: torch.device,
        *,
        stages: Sequence[int],
        num_stages: int,
        rank_of: Callable[[int], int],
        is_dynamic: bool = False,
        goes_on: bool = True,
        fake_stages: FakeStages | None = None,
        wire: WireFormat | None = None,
    ) -> None:
        self._comm = comm
        self._compute = compute
        self._channel = Channel(comm, gradients, device, fake_stages, wire)
        self._device = device
        self._stages = frozenset(stages)
        self._num_stages = num_stages
        # The sends whose tensors are kept. On an accelerator one ends when the receiver comes to its RECV,
        # soon: both have one place in the common order of transfers. Elsewhere it ends when the receiver waits for it:
        # a schedule lets a stage be ahead of the next one, at most one micro-batch for each stage.
        self._most_sent = 4 if is_accelerator(device) else 2 * num_stages
        self._rank_of = rank_of
        self._is_dynamic = is_dynamic
        self._goes_on = goes_on
        self._has_loss = self._keeps_outputs = False
        self.splits_backward = True  # False: I does the work of W too
        self.timeline: list[TimedAction] | None = None  # filled where it is a list
        self._started = 0.0  # when the action began, after what it waited for
        self._reset([])

    def _reset(self, batches: Sequence[MicroBatch]) -> None:
        self._batches = batches
        self._visits: dict[tuple[int, int], _Visit] = {}
        self._arriving: dict[tuple[int, str, int], Incoming] = {}
        # Between this rank's own stages.
        self._handed: dict[tuple[int, str, int], tuple[MessageForm, list[torch.Tensor | None]]] = {}
        self._channel.reset()
        self._failure: Failure | None = None
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []
        self.with_input_gradient: set[int] = set()  # stages that gave the stage before a gradient

    def forget(self) -> None:
        """After a failure on any rank: structures of messages are sent anew. Every rank calls."""
        self._channel.forget()

    @torch.enable_grad()
    def train(self, actions: Sequence[Action], batches: Sequence[MicroBatch]) -> Failure | None:
        """Run a step's actions.

        Returns: this rank's first error, which it has survived (``goes_on``); else None.
        """
        return self._run(actions, batches, is_training=True)

    @torch.no_grad()
    def evaluate(
        self,
        actions: Sequence[Action],
        batches: Sequence[MicroBatch],
        *,
        has_loss: bool = True,
        keeps_outputs: bool = False,
    ) -> Failure | None:
        """Run forward actions alone.

        Args:
            has_loss: ``losses`` gets the last stage's, by micro-batch.
            keeps_outputs: ``outputs`` gets what the last stage returned, by micro-batch.
        """
        self._has_loss, self._keeps_outputs = has_loss, keeps_outputs
        return self._run(actions, batches, is_training=False)

    def _run(self, actions: Sequence[Action], batches: Sequence[MicroBatch], *, is_training: bool) -> Failure | None:
        if self._is_dynamic:  # each message has a structure of its own
            self._channel.forget()
            batches = [replace(batch, signature=micro) for micro, batch in enumerate(batches)]
        self._reset(batches)
        begin = time.perf_counter()
        try:
            for action in actions:
                self._started = time.perf_counter()
                self._perform(action, is_training=is_training)
                if self.timeline is not None:
                    end = time.perf_counter() - begin
                    self.timeline.append(TimedAction(action, self._started - begin, end))
            while self._channel.sent:
                self._channel.sent.popleft().drain()
            for incoming in self._arriving.values():  # after an error
                incoming.wait()
        finally:
            failure, losses, outputs, stages = self._failure, self.losses, self.outputs, self.with_input_gradient
            self._reset([])
            self.losses, self.outputs, self.with_input_gradient = losses, outputs, stages
        return failure

    def _perform(self, action: Action, *, is_training: bool) -> None:
        stage, kind = action.stage, action.kind
        micro = -1 if action.micro is None else action.micro
        try:
            if kind in _TRANSFERS:
                self._transfer(action, micro, is_training=is_training)
            elif kind == "UNSHARD":
                self._compute.unshard(stage)
            elif kind == "RESHARD":
                self._compute.reshard(stage)
            elif kind == "REDUCE_GRAD":
                self._compute.reduce(stage)
            elif self._failure is not None:
                pass  # what would be computed from is missing
            elif kind == "F":
                self._forward(stage, micro, is_training=is_training)
            elif kind in ("B", "I"):
                self._backward(stage, micro, is_split=kind == "I" and self.splits_backward)
            elif kind == "W":
                self._backward_weights(stage, micro)
            else:
                raise UsageError(f"a pipeline schedule has no action {kind!r}.", code="pipeline-schedule")
        except Exception as error:
            error.add_note(f"in action {action} of the pipeline schedule: stage {stage}, micro-batch {micro}, {kind}")
            if not self._goes_on or isinstance(error, CommError) or self._failure is not None:
                raise
            self._failure = Failure(str(action), error)
            self._visits.clear()

    # tensors between stages

    def _transfer(self, action: Action, micro: int, *, is_training: bool) -> None:
        stage, kind, _ = action
        signature = self._batches[micro].signature
        is_forward = kind.endswith("F")
        other = stage + (1 if kind in ("SEND_F", "RECV_B") else -1)
        peer = self._rank_of(other)
        receiver = other if kind.startswith("SEND") else stage
        label = f"stage {receiver} {'F' if is_forward else 'B'}{micro}"
        # The structure of a gradient is that of what was sent forward over the same boundary.
        forward = f"{receiver if is_forward else receiver + 1}{'' if is_training else ' evaluation'}"
        if kind == "RECV_F":
            form = self._channel.learn(forward, signature, peer, label=label)
            self._arriving[stage, "F", micro] = self._channel.recv(form, peer, label=label)
        elif kind == "RECV_B":
            known = self._channel.known(forward, signature)
            assert known is not None  # its forward was sent
            self._arriving[stage, "B", micro] = self._channel.recv(known.gradients, peer, label=label)
        elif kind == "SEND_F":
            form, tensors = self._to_send_forward(stage, micro, forward, signature)
            try:
                self._channel.agree(forward, signature, form, peer, label=label)
            except UsageError as error:  # the receiver waits for what it knows
                known = self._channel.known(forward, signature)
                if known is None or not self._goes_on:
                    raise
                self._failure = self._failure or Failure(f"{stage}SEND_F{micro}", error)
                form, tensors = known, self._zeros(known)
            self._channel.send(form, tensors, peer, label=label)
        else:
            known = self._channel.known(forward, signature)
            assert known is not None
            gradients = self._to_send_backward(stage, micro, known)
            self._channel.send(known.gradients, gradients, peer, label=label)
        while len(self._channel.sent) > self._most_sent:
            self._channel.sent.popleft().drain()

    def _to_send_forward(
        self, stage: int, micro: int, boundary: str, signature: int
    ) -> tuple[MessageForm, list[torch.Tensor]]:
        visit = self._visits.get((stage, micro))
        if visit is not None and visit.output_form is not None:
            if not torch.is_grad_enabled():
                del self._visits[stage, micro]
            return visit.output_form, visit.outputs
        known = self._channel.known(boundary, signature) or _FAILED
        return known, self._zeros(known)  # after an error: the next stage waits for it

    def _to_send_backward(self, stage: int, micro: int, known: MessageForm) -> list[torch.Tensor]:
        """The gradients of what was received; zeros for one that did not need it."""
        visit = self._visits.get((stage, micro))
        if visit is None or self._failure is not None:
            return self._zeros(known.gradients)
        gradients, visit.input_gradients = visit.input_gradients, []
        return [
            torch.zeros(form.shape, dtype=form.dtype, device=self._device) if gradient is None else gradient
            for form, gradient in zip(known.gradients.tensors, gradients, strict=True)
        ]

    def _zeros(self, form: MessageForm) -> list[torch.Tensor]:
        return [torch.zeros(t.shape, dtype=t.dtype, device=self._device) for t in form.tensors]

    # what is computed

    def _received(self, stage: int, direction: str, micro: int) -> tuple[MessageForm, list[torch.Tensor | None]]:
        handed = self._handed.pop((stage, direction, micro), None)
        if handed is not None:
            return handed
        incoming = self._arriving.pop((stage, direction, micro))
        tensors: list[torch.Tensor | None] = list(incoming.wait())
        self._started = time.perf_counter()
        return incoming.form, tensors

    def _forward(self, stage: int, micro: int, *, is_training: bool) -> None:
        visit, batch, received = _Visit(), self._batches[micro].data, None
        if stage > 0:
            form, tensors = self._received(stage, "F", micro)
            if form == _FAILED:
                self._failure = Failure(f"{stage}F{micro}", None)
                return
            for tensor, part in zip(tensors, form.tensors, strict=True):
                if part.has_gradient and tensor is not None:
                    visit.inputs.append(tensor.requires_grad_())
            visit.input_form, received = form, unflatten(form.tree, tensors)
        output = self._compute.forward(stage, received, batch)
        if stage == self._num_stages - 1:
            if is_training:
                visit.outputs = [self._compute.loss(output, batch)]
                self.losses.append(visit.outputs[0].detach())
            else:
                if self._has_loss:
                    self.losses.append(self._compute.loss(output, batch))
                if self._keeps_outputs:
                    self.outputs.append(output)
        else:
            visit.output_form, visit.outputs = flatten(output, f"stage {stage}")
            if stage + 1 in self._stages:
                handed: list[torch.Tensor | None] = [tensor.detach() for tensor in visit.outputs]
                self._handed[stage + 1, "F", micro] = visit.output_form, handed
        if is_training or stage + 1 not in self._stages:
            self._visits[stage, micro] = visit

    def _output_gradients(self, stage: int, micro: int, visit: _Visit) -> tuple[list[Any], list[Any]]:
        """The tensors from which a stage's backward starts, and their gradients."""
        if stage == self._num_stages - 1:
            return visit.outputs, [None]
        _, gradients = self._received(stage, "B", micro)
        assert visit.output_form is not None
        ends = [t for t, part in zip(visit.outputs, visit.output_form.tensors, strict=True) if part.has_gradient]
        return ends, gradients

    def _backward(self, stage: int, micro: int, *, is_split: bool) -> None:
        visit = self._visits[stage, micro]
        ends, gradients = self._output_gradients(stage, micro, visit)
        if is_split and visit.inputs:
            # They load torch's compiler.
            from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc, stage_backward_input

            starts = [torch.ones_like(end) if g is None else g for end, g in zip(ends, gradients, strict=True)]

            def inputs() -> None:
                # They are detached in place, which a view, an input that is passed on, and one of which another one
                # is computed cannot be.
                is_one = len(ends) == 1
                visit.outputs = [end if is_one and not (end._is_view() or end.is_leaf) else end.clone() for end in ends]
                pairs = [(end, start) for end, start in zip(visit.outputs, starts, strict=True) if end.requires_grad]
                edges = [torch.autograd.graph.get_gradient_edge(end) for end, _ in pairs]
                try:
                    of_inputs, visit.weight_groups = stage_backward_input(
                        visit.outputs, starts, visit.inputs, iter(self._compute.weights(stage))
                    )
                except RuntimeError as error:  # torch's has the shapes alone
                    raise error.__cause__ or error from None
                if all(gradient is None for gradient in of_inputs):  # no weight is on the way to an input
                    visit.weight_groups = (edges, [start for _, start in pairs])
                elif len(edges) > 1:  # one output may depend on an input, and another one on weights alone
                    known = {node for group in visit.weight_groups for node in group["params"]}
                    left = [w for w in self._compute.weights(stage) if _get_grad_fn_or_grad_acc(w) not in known]
                    visit.weights_left = (edges, [start for _, start in pairs], left) if left else None

            self._compute.backward(inputs, stage)
        elif is_split:
            visit.weight_groups = (ends, gradients)  # no input has a gradient: all is done in W
        else:
            self._compute.backward(lambda: self._whole(ends, gradients), stage)
        self._end_backward(stage, micro, visit)
        if not is_split:
            visit.outputs = []

    def _whole(self, ends: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
        """Args: ends: tensors, or edges of the graph."""
        pairs = [(end, g) for end, g in zip(ends, gradients, strict=True) if getattr(end, "requires_grad", True)]
        if pairs:
            torch.autograd.backward([end for end, _ in pairs], [g for _, g in pairs])

    def _backward_weights(self, stage: int, micro: int) -> None:
        visit = self._visits[stage, micro]
        groups, visit.weight_groups = visit.weight_groups, None
        left, visit.weights_left = visit.weights_left, None
        if isinstance(groups, tuple):
            ends, gradients = groups
            self._compute.backward(lambda: self._whole(ends, gradients), stage)
        elif groups is not None:
            from torch.distributed.pipelining._backward import stage_backward_weight

            def weights() -> None:
                stage_backward_weight(iter(self._compute.weights(stage)), groups)
                if left is not None:
                    edges, gradients, leaves = left
                    torch.autograd.backward(edges, gradients, inputs=leaves)

            self._compute.backward(weights, stage, is_weight_pass=True)
        visit.outputs = []

    def _end_backward(self, stage: int, micro: int, visit: _Visit) -> None:
        visit.input_gradients = [tensor.grad for tensor in visit.inputs]
        if any(gradient is not None for gradient in visit.input_gradients):
            self.with_input_gradient.add(stage)
        for tensor in visit.inputs:
            tensor.grad = None
        visit.inputs = []  # what was received is free
        if stage - 1 in self._stages and stage > 0:
            assert visit.input_form is not None
            self._handed[stage - 1, "B", micro] = visit.input_form.gradients, visit.input_gradients
            visit.input_gradients = []
