"""Messages and collectives between the pipeline stages of a dry run: each begins when all that take part are ready."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.comm.fake_stages import FakeStageCommunicator
from shoal.comm.protocol import Work
from shoal.simulation.clocks import SimulatedStream
from shoal.simulation.collectives import SimulatedCommunicator, SimulatedWork, StreamsOfCollectives, accesses
from shoal.simulation.times import StreamTimes


class SimulatedStageCommunicator(SimulatedCommunicator):
    """Ranks of several stages. What another stage brings takes its place in a stream when it is waited for.

    Args:
        new_stream: makes a stream. Messages from and to each stage have one of their own.
    """

    def __init__(
        self,
        backend: FakeStageCommunicator,
        accelerator: StreamsOfCollectives,
        ranks: tuple[int, ...],
        times: StreamTimes,
        new_stream: Callable[[str], SimulatedStream],
    ) -> None:
        super().__init__(backend, accelerator, new_stream(f"the stream of collectives on {backend.axis!r}"), ranks)
        self._stages = backend
        self._times = times
        self._new_stream = new_stream
        self._of_messages: dict[tuple[str, int], SimulatedStream] = {}

    def _stream_of(self, name: str, peer: int) -> SimulatedStream:
        if (name, peer) not in self._of_messages:
            way = "to" if name == "send" else "from"
            self._of_messages[name, peer] = self._new_stream(f"the stream of messages {way} stage {peer}")
        return self._of_messages[name, peer]

    def _issue(
        self,
        name: str,
        label: str,
        out: torch.Tensor,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        start: Callable[[torch.Tensor], Work],
        *,
        is_copied: bool = False,
        land: Callable[[], None] | None = None,
        peer: int | None = None,
    ) -> Work:
        accelerator, stages, times = self._accelerator, self._stages, self._times
        tensors = [tensor for tensor in (source, target) if tensor is not None]
        is_message = name in ("send", "recv") and peer is not None
        stream = self._stream_of(name, peer) if is_message and peer is not None else self._stream
        stream.wait_stream(accelerator.current())
        with accelerator.paused(), torch.no_grad():
            work = start(tensors[0] if source is None else source.detach().clone())
        what = f"{name} {label!r}"
        accelerator.run(what, stream, *accesses(source, target))
        pair = self.ranks if peer is None or not is_message else (self.ranks[self.rank], self.ranks[peer])
        cost = times.collective(name, max(tensor.nbytes for tensor in tensors), pair)
        event, number = accelerator.event(), -1
        if name == "send" and peer is not None:
            times.add(stream, what, cost)
            assert stream.clock.last is not None
            stages.post(peer, label, tensors[0], stream.clock.last.start)
            event.record(stream)
        elif name == "recv" and peer is not None:
            number = stages.expect(peer)
        else:
            number = stages.tell(stream.clock.seconds)

        def deliver() -> None:
            if name == "recv" and peer is not None:
                times.add_received(stream, what, stages.take(peer, number, label, tensors[0]), cost)
                event.record(stream)
            elif name != "send":
                times.add_received(stream, what, max(stages.hear(number, label)), cost)
                event.record(stream)
            with torch.no_grad():
                values = work.wait()
                if is_copied and target is not None:
                    target.detach().copy_(values.view(target.shape))

        return SimulatedWork(accelerator, event, out, [*tensors, out], deliver, land)
