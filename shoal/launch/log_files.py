"""The files that TorchElastic redirects the ranks' output to, followed from the start of each rank."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, Std

from shoal.launch.failure import describe_restart, errors_of
from shoal.launch.output import RankOutput


class FollowedFiles(DefaultLogsSpecs):
    """Tells ``output`` the files of each attempt, and the ranks' numbers among those of all machines.

    Args:
        redirects: what of each local rank goes to a file.
        alone: follow local rank 0 only, without a prefix.
    """

    def __init__(self, output: RankOutput, log_dir: Path, redirects: dict[int, Std], *, alone: bool) -> None:
        super().__init__(log_dir=str(log_dir), redirects=redirects)
        self._output = output
        self._is_alone = alone
        self._ranks: dict[int, int] = {}  # of the attempt before, by local rank

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        if self._ranks:
            errors = errors_of(Path(self.root_log_dir), len(self._ranks))
            why = describe_restart({self._ranks[here]: error for here, error in errors.items()})
            self._output.begin_attempt(why, [here for here, error in errors.items() if error.is_of_a_lost_peer])
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


def followed_files(output: RankOutput, log_dir: Path, num_ranks: int, *, rank_0_keeps_terminal: bool) -> FollowedFiles:
    """All output of all ranks; or rank 0's stderr alone, whose stdout stays the terminal."""
    redirects = dict.fromkeys(range(num_ranks), Std.ALL)
    if rank_0_keeps_terminal:
        redirects[0] = Std.ERR
    return FollowedFiles(output, log_dir, redirects, alone=rank_0_keeps_terminal)
