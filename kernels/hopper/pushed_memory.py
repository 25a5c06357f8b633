"""What kernels that push share with those of the other ranks, as they take it: memory for data, how
far each rank is, and the count of each program's launches.

In: a Team. Out: the arguments that such kernels have in common. All of it has two copies, for
launches of odd and even number; see all_reduce.py. Next on the walk: all_reduce.py.
"""

import torch
from torch import Tensor

from distmega.errors import HangError
from distmega.kernels.runtime.alarm import Alarm
from distmega.kernels.runtime.report import REPORT_WORDS
from distmega.kernels.runtime.symmetric import SymmetricMemory, Team

COPIES = 2


class ArrivalMemory:
    """For data that go as they are, with a word behind them: `words_each` int64 of each rank for
    each program. arguments: mine, peers, arrived, words, epochs, team_rank.
    """

    def __init__(self, team: Team, num_programs: int, words_each: int) -> None:
        """Collective."""
        slots = COPIES * team.size * num_programs
        held = slots * words_each
        self._memory, peers = _open(team, held + -(-slots // 2))
        words = tuple(each[held:].view(torch.int32) for each in peers)
        mine, arrived = peers[team.team_rank], words[team.team_rank]
        epochs = _zeros(num_programs, mine)
        self.arguments = mine, peers, arrived, words, epochs, team.team_rank


class FlaggedMemory:
    """For flagged words: `num_words` of each copy. arguments: report, mine, peers, epochs,
    team_rank.
    """

    def __init__(
        self, team: Team, num_words: int, num_programs: int, name: str, timeout_s: float
    ) -> None:
        """Collective. name: of the call, in errors. timeout_s: bound on a wait for a peer."""
        self._name, self._team_rank, self._ranks = name, team.team_rank, team.size
        self._memory, words = _open(team, COPIES * num_words + REPORT_WORDS)
        report = words[team.team_rank]
        self._alarm = Alarm(report, timeout_s)
        peers = tuple(each[REPORT_WORDS:] for each in words)
        mine = peers[team.team_rank]
        self.arguments = report, mine, peers, _zeros(num_programs, mine), team.team_rank

    def check(self, rank_words: int) -> None:
        """HangError if a peer did not push in an earlier call, whose result is void. rank_words:
        from one rank's words to the next one's.
        """
        report = self._alarm.take()
        if report is None:
            return
        owner = (report.word - REPORT_WORDS) // rank_words % self._ranks
        raise HangError(
            f"rank {self._team_rank}, program {report.last} of an {self._name} waited "
            f"{self._alarm.limit_s:g} s for word {report.word}",
            expected=f"what rank {owner} pushes in launch {report.flag}",
            remedy="see whether that rank made the same call",
        )


def _open(team: Team, num_words: int) -> tuple[SymmetricMemory, tuple[Tensor, ...]]:
    """int64 words of each rank, and what keeps them."""
    memory = team.open(8 * num_words)
    ranks = range(team.size)
    return memory, tuple(memory.tensor(rank, (num_words,), torch.int64) for rank in ranks)


def _zeros(num_programs: int, like: Tensor) -> Tensor:
    return torch.zeros(num_programs, dtype=torch.int32, device=like.device)
