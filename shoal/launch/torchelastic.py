"""Two parts of TorchElastic that Shoal replaces: the files of the ranks' output, and the rendezvous of an elastic job.

TorchElastic caches the address of rank 0 in the first round. A machine that joins later waits forever for the address,
which no machine publishes in its round; and ranks would use a store that still has the last round's keys. Here rank 0's
machine publishes the address in each round, with a new port at which rank 0 listens itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, Std
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from shoal.launch.failure import RankError, describe_attempt, errors_of
from shoal.launch.hang import HangWatch
from shoal.launch.output import RankOutput


class SameFailureError(Exception):
    """Two attempts in a row failed alike, in the same step or before the first: a third one would, too."""


class FirstFailure(logging.Filter):
    """The first process of an attempt that failed, which TorchElastic says in its log alone. Lets no record pass."""

    local_rank_and_code: tuple[int, int] | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("failed (exitcode: %s) local_rank: %s") and isinstance(record.args, tuple):
            code, local_rank, *_ = record.args
            self.local_rank_and_code = int(str(local_rank)), int(str(code))
        return False


class FollowedFiles(DefaultLogsSpecs):
    """Tells ``output`` and ``watch`` of each attempt: its files, and the ranks' numbers among those of all machines.

    Args:
        rank_0_keeps_terminal: follow only local rank 0's stderr, without a prefix; its stdout stays the terminal.
    """

    def __init__(
        self, output: RankOutput, watch: HangWatch, log_dir: Path, num_ranks: int, *, rank_0_keeps_terminal: bool
    ) -> None:
        redirects = dict.fromkeys(range(num_ranks), Std.ALL)
        if rank_0_keeps_terminal:
            redirects[0] = Std.ERR
        super().__init__(log_dir=str(log_dir), redirects=redirects)
        self._output = output
        self._watch = watch
        self._is_alone = rank_0_keeps_terminal
        self._ranks: dict[int, int] = {}  # of the attempt before, by local rank
        self._last: set[tuple[object, ...]] = set()  # the failures of that attempt
        self.first_failure = FirstFailure()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        if self._ranks:
            errors = errors_of(Path(self.root_log_dir), len(self._ranks))
            hang = self._watch.finish()
            first, self.first_failure.local_rank_and_code = self.first_failure.local_rank_and_code, None
            failure = describe_attempt(
                {self._ranks[here]: error for here, error in errors.items()},
                (self._ranks[first[0]], first[1]) if first is not None else None,
            )
            self._check_progress(hang, errors, failure, first)
            why = f"shoal: all ranks are started anew{f': {failure}' if failure else '.'}"
            withheld = [here for here, error in errors.items() if error.is_of_a_lost_peer]
            self._output.begin_attempt(f"{hang}\n{why}" if hang else why, withheld)
            self._watch.begin_attempt()
        self._ranks = {local_rank: int(environment["RANK"]) for local_rank, environment in envs.items()}
        files = super().reify(envs)
        for local_rank, environment in envs.items():
            if not self._is_alone:
                prefix = f"[rank {environment['RANK']}] "
                paths = files.stdouts[local_rank], files.stderrs[local_rank]
                self._output.follow(local_rank, prefix, stdout=paths[0], stderr=paths[1])
            elif local_rank == 0:
                self._output.follow(0, "", stdout="", stderr=files.stderrs[0])
        return files

    def _check_progress(
        self, hang: str, errors: Mapping[int, RankError], failure: str, first: tuple[int, int] | None
    ) -> None:
        """Raises: SameFailureError: the attempt before failed in the same step, of the same cause."""
        own = {(rank, error.key) for rank, error in errors.items() if error.error and not error.is_of_a_lost_peer}
        step, who_hangs = self._watch.step, hang.partition(";")[0]  # the rest has paths, and times of reading
        causes: set[tuple[object, ...]] = {(step, who_hangs)} if hang else {(step, *each) for each in own}
        if step is None and first is not None and first[1] > 0 and not errors[first[0]].error:
            causes.add(first)  # such as a wrong argument
        last, self._last = self._last, causes
        if last & causes:  # others may have failed in one of the two alone
            place = "before initialize" if step is None else f"in step {step}"
            raise SameFailureError(
                f"{hang or f'shoal: {failure}'}\n"
                f"shoal: the attempt before failed alike, also {place}, so the job is not started again."
            )


NAME = "shoal"


class Rounds:
    """TorchElastic's rendezvous handler, except that rank 0's address is published in each round."""

    use_agent_store = False  # rank 0 listens itself

    def __init__(self, handler: RendezvousHandler, address: str | None) -> None:
        self._handler = handler
        self._address = address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def get_backend(self) -> str:
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other machines."""
        info = self._handler.next_rendezvous()
        first = info.bootstrap_store_info
        if info.rank == 0 and first is not None:  # for machines that come now, whose handlers wait for it
            info.store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, first.master_addr)
            info.store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(first.master_port))
        mine = RendezvousStoreInfo.build(info.rank, PrefixStore("round", info.store), local_addr=self._address)
        return RendezvousInfo(info.store, info.rank, info.world_size, mine)


def make_rounds(parameters: RendezvousParameters) -> RendezvousHandler:
    """The handler of this machine."""
    backend, store = create_backend(parameters)
    return cast(RendezvousHandler, Rounds(create_handler(store, backend, parameters), parameters.local_addr))


def register() -> str:
    """Register ``make_rounds`` with TorchElastic. Returns: its name there."""
    rendezvous_handler_registry.register(NAME, make_rounds)
    return NAME
