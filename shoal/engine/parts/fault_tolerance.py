"""``fault_tolerance``: replicas that are jobs of their own; one that fails is left out, and joins again.

    step of a member                                                 of a replica that has started while others train
    forward, backward, sum over the ranks of this job                the same; its gradient is not used
                                                                     waits for a commit, receives the state of a member
    arrive: which replicas are there, and who of them contributes    arrive: contributes zeros
    mean of the gradients over them, on the host                     the same
    vote: if one has failed, the rest form the mean again            the same
    commit: the mean becomes the gradient; the optimizer             the same: it has the parameters of the others
    the samples of the next step are divided among the members       the same: from the next step on it contributes

Until the commit the gradients of this job stay as they are, so that their mean can be formed again. Each rank talks to
the same rank of the other replicas, over Gloo: the layout inside of a replica is the same everywhere, and free.

A member that dies before its gradient is in the mean has not used its samples: the others take them first.

With ``local_steps`` all this is done at a synchronisation, with outer gradients. A replica joins right after one: its
first step only receives the state, and it takes the steps of the next round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from shoal.comm.environment import quorum_token
from shoal.comm.protocol import Communicator
from shoal.comm.quorum import AXIS, Message, Quorum, ReplicaLink, address_of
from shoal.data.loading import Loader
from shoal.engine.accumulation import Accumulation
from shoal.engine.log import logger
from shoal.engine.parts.part import Part
from shoal.engine.parts.replicas import DifferingBits, sums_of_bits
from shoal.engine.peer_state import ExportedState, PeerState
from shoal.engine.settings import Properties
from shoal.engine.sharding import Sharding
from shoal.errors import CommError, ConfigError, UsageError
from shoal.running.status import GlobalStatus
from shoal.sharding.buffer import FlatBuffer
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.placement import PARTIAL, SHARD, Placement
from shoal.sharding.storage import DeviceStorage
from shoal.streams import carried
from shoal.text import counted

_CPU = torch.device("cpu")


class FaultTolerance(Part):
    """Sums over the replicas that are there.

    Raises: ConfigError: a technique that replicas of their own exclude.
    Communicates: in a step two questions to the server, an exchange of a few bytes and an all_reduce of this rank's
        range of the gradients, between the hosts. Memory: that range twice, on the host.
    """

    def __init__(self, sharding: Sharding, properties: Properties, accumulation: Accumulation) -> None:
        self._sharding = sharding
        self._accumulation = accumulation
        self._device = properties.device
        self._check_steps = properties.config.debug.replica_check_steps
        self._world, self._batch = properties.axes.world, properties.axes.batch
        _refuse(sharding, properties)
        assert properties.config.fault_tolerance.quorum is not None
        self._address = address_of(properties.config.fault_tolerance.quorum)
        self._quorum: Quorum | None = None  # of the first rank
        self._is_local = properties.config.local_steps.every is not None
        self._commit: Message = {}  # the last one
        self._is_committed = False  # in this step
        self._fresh: dict[str, int] | None = None  # counters of the state that this step, which ends no round, received
        self._assigned: list[int] = []  # replicas that took samples of the step under way
        self._merged: dict[str, Any] = {}  # what all replicas know of the step, once it is committed
        self._has_joined = False
        self._samples = 0  # ``global_samples`` when the step began
        self._adopted: dict[str, Any] | None = None  # a member's loader at the end of the step, on a replica that joins
        self._sender: threading.Thread | None = None
        self._sent: Callable[[], None]  # to be called after the sender's end

    @property
    def replicas(self) -> tuple[int, int]:
        """The number of this replica among those that take samples, from 0, and how many they are."""
        is_one = self._has_joined and self._link.serial in self._assigned
        return (self._assigned.index(self._link.serial), len(self._assigned)) if is_one else (0, 1)

    def prepare(self, engine: Any) -> None:
        self._run = engine.run_state
        self._peer = PeerState(engine)
        if self._world.rank == 0:
            self._quorum = Quorum(self._address, quorum_token())
        about = self._ask("hello")
        self._link = ReplicaLink(self._address[0], about, self._world.rank)
        if about["members"]:  # the run begins: all start from the parameters of the first
            self._has_joined, self._assigned = True, about["members"]
            self._link.open(about["members"], about["generation"])
            number, others = self.replicas[0], range(1, len(self._assigned))
            if number:
                self._peer.receive(self._link.comm, 0)
            else:
                exported = self._peer.export(is_start=True)
                for other in others:
                    exported.send(self._link.comm, other)
        else:
            self._log("this replica joins at the end of its first step")

    def _log(self, text: str) -> None:
        if self._world.rank == 0:
            logger.info("fault_tolerance: %s.", text)

    def _ask(self, op: str, *, is_ok: bool = True) -> Message:
        """Ask the server. Every rank calls; ``is_ok`` holds where it does on all of them."""
        oks = self._world.gather_objects(is_ok, label="replicas: agree")
        reply = None if self._quorum is None else self._quorum.ask(op, is_ok=all(oks))
        answer: Message = self._world.gather_objects(reply, label="replicas: answer")[0]
        return answer

    # the step

    @torch.no_grad()
    def at_reduction(self, status: GlobalStatus) -> GlobalStatus:
        """Replace the gradients by their mean over the replicas.

        Raises: UsageError: replicas are at different steps. CommError: the server has ended, or left this replica out.
        """
        if not self._has_joined:
            self._join()
        accumulation = self._accumulation
        num_done = accumulation.micro_in_step * accumulation.micro_batch * accumulation.num_ranks
        self._samples = accumulation.counters.global_samples - num_done
        if self._is_local:
            return status
        if not self._merged:
            values = [(group, group.gradient.owned()) for group in self._sharding.groups]
            self._use(*self._agree(values, self._about(status)))
        now = self._sharding.synchronize_status(None)
        return replace(status, norm=now.norm, bad_gradient_ranks=now.bad_gradient_ranks, **self._merged)

    @torch.no_grad()
    def average(self, values: Sequence[tuple[ParameterGroup, torch.Tensor]]) -> list[torch.Tensor] | None:
        """The means over the replicas, at a synchronisation of local steps. Every rank calls.

        Args:
            values: of this rank's range of each group.

        Returns: in host memory; None: this step has received the state of after the synchronisation.
        Raises: as ``at_reduction``.
        """
        if self._fresh is not None:
            return None
        _, means = self._agree(values, {"step": self._accumulation.counters.global_steps, "loader": None})
        return [value if mean is None else mean for (_, value), mean in zip(values, means, strict=True)]

    def _agree(
        self, values: Sequence[tuple[ParameterGroup, torch.Tensor]], about: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], list[torch.Tensor | None]]:
        """Form means until all members have them. Args, Returns: as ``_form``."""
        reply, formed = self._ask("arrive", is_ok=not self._link.is_broken), None
        while not reply.get("is_committed"):
            formed = self._form(reply, values, about)
            reply = self._ask("vote", is_ok=formed is not None)
        assert formed is not None
        self._commit, self._is_committed = reply, True
        if reply["sources"]:
            self._open(reply)
        return formed

    def _join(self) -> None:
        """Receive the state of a member, as it is after its last step."""
        reply = self._ask("join", is_ok=self._is_local)
        self._link.open(reply["members"], reply["generation"])
        joining = dict(reply["sources"])
        self._peer.receive(self._link.comm, self._link.members.index(joining[self._link.serial]))
        self._has_joined, self._commit, self._assigned = True, reply, self._takers(reply)
        if self._is_local:
            counters = self._accumulation.counters
            self._fresh = {**vars(counters), "micro_steps": counters.micro_steps - self._accumulation.micro_in_step}
        self._log(f"has joined at step {self._accumulation.counters.global_steps}")

    def _open(self, reply: Message) -> bool:
        """Connect to the members. Returns: False: one of them has ended meanwhile."""
        try:
            self._link.open(reply["members"], reply["generation"])
        except CommError as error:
            self._drop(error)
        return not self._link.is_broken

    def _drop(self, error: CommError) -> None:
        self._link.drop()
        self._log(f"the step is repeated without a replica that has failed ({error.what})")

    def _takers(self, reply: Message) -> list[int]:
        """The members that take samples after a commit: with local steps also those that join."""
        joining = dict(reply["sources"])
        return [serial for serial in reply["members"] if self._is_local or serial not in joining]

    def _form(
        self, reply: Message, values: Sequence[tuple[ParameterGroup, torch.Tensor]], about: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], list[torch.Tensor | None]] | None:
        """Form the means of this rank's values over the contributors.

        Args:
            about: what this replica says of the step.

        Returns: what the contributors say, and the means on the host (see ``_mean``); None: a replica has failed.
        """
        self.wait_sent()
        if not self._open(reply):
            return None
        contributors, comm = reply["contributors"], self._link.comm
        contributes = self._link.serial in contributors
        with_data = contributes and len(contributors) < len(reply["members"])  # a replica joins
        # With tokens the sum is divided by all of them afterwards.
        is_sum = self._accumulation.counts_tokens and not self._is_local
        scale = 1.0 if is_sum else 1 / max(len(contributors), 1)
        try:
            loader = self._run.training_dataloader
            if with_data and isinstance(loader, Loader):
                about = {**about, "loader": loader.step_state()}
            said = comm.gather_objects(about, label="replicas: status")
            if len({of_one["step"] for of_one in said}) > 1:
                raise UsageError(
                    f"replicas are at steps {', '.join(str(of_one['step']) for of_one in said)}.",
                    do="let all of them load the same checkpoint, or none.",
                    code="replicas-steps",
                )
            self._compare_bits(said)
            means = [self._mean(*of_group, comm, scale, contributes=contributes) for of_group in values]
        except CommError as error:
            self._drop(error)
            return None
        return [of_one for s, of_one in zip(reply["members"], said, strict=True) if s in contributors], means

    def _compare_bits(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Raises: ModelError: this replica has other bits than most, or no bits are those of most."""
        sums = {
            name: [of_one["bits"].get(name, first) for of_one in said]
            for name, first in said[0].get("bits", {}).items()
        }
        differing = {name: column for name, column in sums.items() if len({*column}) > 1}
        if not differing:
            return
        difference = DifferingBits("replica", range(len(said)), differing)
        error = difference.error("the replicas", f"step {said[0]['step'] + 1}")
        if self._link.comm.rank in difference.odd:
            self._link.drop()  # so that the others go on at once
            raise error
        logger.warning("fault_tolerance: %s (%s).", error.what, error.where)

    def _about(self, status: GlobalStatus) -> dict[str, Any]:
        step, every = self._accumulation.counters.global_steps + 1, self._check_steps
        is_compared = every is not None and step % every == 0
        return {
            "bits": sums_of_bits(self._sharding, self._device.torch_device) if is_compared else {},
            "step": self._accumulation.counters.global_steps,
            "losses": status.losses,
            "tokens": status.tokens,
            "num_tokens": status.num_tokens,
            "bad_loss_ranks": status.bad_loss_ranks,
            "has_grad": b"".join(status.has_grad.values()).hex(),
            "loader": None,
        }

    def _mean(
        self, group: ParameterGroup, value: torch.Tensor, comm: Communicator, scale: float, *, contributes: bool
    ) -> torch.Tensor | None:
        """The mean of a value of this rank's range, in host memory. None: there is one replica, and it is its own.

        Communicates: an all_reduce of the range over the replicas.
        """
        buffer, own = group.buffer, value.detach()
        if self._link.is_alone and contributes:
            return None
        padding = (0, -own.numel() % comm.size)  # so that each replica sums a part of one size
        sent = torch.nn.functional.pad(own.to(_CPU, copy=True), padding)
        if not contributes:
            sent.zero_()
        is_range = {group.axes.shard: SHARD}
        placed = Placement.of(**is_range, **{AXIS: PARTIAL})
        axes, storage = {AXIS: comm.blocking}, DeviceStorage(sent)
        summed = FlatBuffer(buffer.label, buffer.layout, sent.dtype, _CPU, buffer.comm, axes, placed, storage=storage)
        summed.redistribute(Placement.of(**is_range), scale=scale).wait()
        return sent[: own.numel()]

    def _use(self, said: Sequence[Mapping[str, Any]], means: Sequence[torch.Tensor | None]) -> None:
        """The step is committed: the means are the gradients."""
        flags = [bytes.fromhex(of_one["has_grad"]) for of_one in said]
        merged: Iterator[int] = map(max, zip(*flags, strict=True))
        has_grad = {group: bytes(islice(merged, len(group.parameters))) for group in self._sharding.groups}
        for group, mean in zip(self._sharding.groups, means, strict=True):
            gradient = group.gradient
            gradient.has_grad = bytearray(has_grad[group])
            if mean is not None:
                gradient.copied.wait()
                gradient.owned().copy_(mean)
        tokens = [of_one["num_tokens"] for of_one in said if of_one["num_tokens"] is not None]
        self._merged = {
            "has_grad": has_grad,
            "losses": tuple(loss for of_one in said for loss in of_one["losses"]),
            "tokens": tuple(number for of_one in said for number in of_one["tokens"]),
            "num_tokens": sum(tokens) if tokens else None,
            "bad_loss_ranks": tuple(rank for of_one in said for rank in of_one["bad_loss_ranks"]),
        }
        self._adopted = next((of_one["loader"] for of_one in said if of_one["loader"] is not None), None)

    def before_step(self) -> bool:
        """False: the replicas that took samples have all ended before their gradients were summed; or the gradient is
        of before this step has received its state.
        """
        self.wait_sent()
        return self._fresh is None and (self._is_local or bool(self._commit["contributors"]))

    def after_step(self) -> None:
        """Divide the samples of the next step, and begin to send the state to replicas that join."""
        commit, counters = self._commit, self._accumulation.counters
        if self._fresh is not None:
            vars(counters).update(self._fresh, global_samples=self._samples)
            self._fresh = None
            self._divide_anew([], has_changed=True)
            return
        users = self._assigned if self._is_local else commit["contributors"]
        counters.global_samples = self._samples + (counters.global_samples - self._samples) * len(users)
        if not self._is_committed:
            return
        contributors, members = commit["contributors"], commit["members"]
        self._merged, self._is_committed = {}, False
        joining = dict(commit["sources"])
        lost = [number for number, serial in enumerate(self._assigned) if serial not in contributors]
        before, self._assigned = self._assigned, self._takers(commit)
        self._divide_anew(lost, has_changed=before != self._assigned)
        receivers = [members.index(serial) for serial, source in joining.items() if source == self._link.serial]
        if receivers and not self._link.is_broken:
            self._start_sending(self._peer.export(), receivers)

    def _start_sending(self, exported: ExportedState, receivers: Sequence[int]) -> None:
        self._device.synchronize()  # another thread reads what the update has written
        send, self._sent = carried(partial(self._send, exported, self._link.comm, receivers), "shoal-state")
        self._sender = threading.Thread(target=send, name="shoal-state", daemon=True)
        self._sender.start()

    def _send(self, exported: ExportedState, comm: Communicator, receivers: Sequence[int]) -> None:
        try:
            for receiver in receivers:
                exported.send(comm, receiver)
        except CommError as error:  # the next sum fails, and is repeated
            self._log(f"the state was not sent to a replica that joins: {error.what}")

    def wait_sent(self) -> None:
        """Wait until this rank's state, which is about to change, has been sent."""
        if self._sender is not None:
            self._sender.join()
            self._sent()
            self._sender = None

    # samples

    def divide_samples(self) -> None:
        """The loader is there: divide its samples among the replicas."""
        self._run.training_dataloader.start_step()
        self._divide_anew([], has_changed=True)

    def _divide_anew(self, lost: Sequence[int], *, has_changed: bool) -> None:
        loader, size = self._run.training_dataloader, self._batch.size
        if not isinstance(loader, Loader):
            return
        if self._adopted is not None and self._link.serial not in self._commit["contributors"]:
            loader.adopt_step(self._adopted)
            has_changed = True
        self._adopted = None
        if lost or has_changed:
            number, count = self.replicas
            ranks = [rank for other in lost for rank in range(other * size, (other + 1) * size)]
            loader.divide(number * size + self._batch.rank, count * size, ranks)
            if self._has_joined:
                again = f"; samples of {counted(len(lost), 'replica')} that ended are taken again" if lost else ""
                self._log(f"number {number} of {counted(count, 'replica')}{again}")
        loader.start_step()
        self._run.begin_step()

    def before_destroy(self) -> None:
        self.wait_sent()
        if self._quorum is not None:
            self._quorum.close()
        self._link.drop()


def _refuse(sharding: Sharding, properties: Properties) -> None:
    """Raises: ConfigError: what is not the same on all replicas after a step, or cannot be sent."""
    config, groups = properties.config, sharding.groups
    experts, is_local = config.expert_parallel, config.local_steps.every is not None
    reasons = {
        "optimizers that sum themselves": any(group.gradient.is_left_partial for group in groups),
        "sparse gradients": any(group.gradient.is_sparse for group in groups),
        "state on a disk": any(group.disk is not None for group in groups),
        "precision.state_dtype of one byte": any(group.state_format is not None for group in groups),
        "super_offload": sharding.step is not None
        and sharding.step.cpu_optimizer is not None
        and sharding.step.cpu_optimizer.is_ahead,
        "expert_parallel.rebalance_every": bool(experts.rebalance_every),
        "expert_parallel.load_balance_coeff": experts.load_balance_coeff is not None,
        "local_steps.fragments and wire": config.local_steps.fragments > 1 or config.local_steps.wire is not None,
        "local_steps of replicas inside of the job": is_local and properties.plan.mesh.dp_replicate > 1,
        "local_steps and fp16": is_local and config.fp16.enabled is True,
    }
    for name, is_used in reasons.items():
        if is_used:
            raise ConfigError(
                f"fault_tolerance.quorum does not go with {name}.", do="leave one of them out.", code="replicas-config"
            )
