"""Signals of host programs between GPUs that reach each other's memory: counters, no host involved.

In: the NCCL communicator of a mesh, an axis, the names of the signals. Out: open_signals sets what
the communicator signals with: PeerSignals, kernels of one warp on the current stream, or where GPUs
share no memory, NCCL. Either way one rank's megakernel starts after another's has ended, while the
hosts run ahead. A wait on peer memory is bounded, and `check` says what did not come. Counters only
grow; the number of signals taken lives on the GPU, so replays of a captured graph count as well.
Next: signal_kernels.py.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from distmega.errors import HangError, LaunchError, argument
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.comm.nccl_signals import NcclSignals
from distmega.kernels.runtime.streams import late
from distmega.kernels.runtime.symmetric import open_symmetric

logger = logging.getLogger(__name__)

ONE = 1, 1, 1
"""Programs of a launch."""
SIGNAL_BYTES = 128
"""From one counter to the next: each has a line of memory, of which one rank writes."""


def open_signals(
    comm: NcclCommunicator, axis: str, names: Sequence[str], timeout_s: float, *, peer_memory: bool
) -> None:
    """Lets the mesh's ranks signal each other along an axis. Collective over all processes.

    names: of all signals; timeout_s: bound of a wait; peer_memory: use it where there is any.
    """
    comm.signals = None
    if peer_memory:
        try:
            comm.signals = PeerSignals(comm, axis, names, timeout_s)
        except LaunchError as error:
            logger.info("signals go over NCCL: %s", error)
    if comm.signals is None:
        comm.signals = NcclSignals(comm, axis, timeout_s)


class PeerSignals:
    """Signals along one axis; hostir/comm/nccl_signals.py states the protocol."""

    on_device = True

    def __init__(
        self, comm: NcclCommunicator, axis: str, names: Sequence[str], timeout_s: float
    ) -> None:
        """Collective over the mesh. LaunchError, on all ranks, where GPUs of a team can't reach
        each other's memory.
        """
        self._axis, self._rank, self._timeout_s = axis, comm.rank, timeout_s
        self._team = comm.mesh.team(axis, comm.rank)
        size = len(self._team)
        memory = self._memory = open_symmetric(comm, axis, SIGNAL_BYTES * len(names) * size)
        slots = {(n, p): i * size + p for i, n in enumerate(names) for p in range(size)}
        self._slots, here = slots, memory.team_rank

        def counter(owner: int, name: str, source: int) -> Tensor:
            at = SIGNAL_BYTES * slots[name, source]
            return memory.tensor(owner, (1,), torch.int32, at)

        self._theirs = {(name, peer): counter(peer, name, here) for name, peer in slots}
        shape = len(slots), SIGNAL_BYTES // 4
        taken = torch.zeros(shape, dtype=torch.int32, device="cuda")
        self._late = torch.zeros(shape, dtype=torch.int32, device="cpu", pin_memory=True)
        self._waits = {
            slot: (counter(here, *slot), taken[row], self._late[row], int(timeout_s * 1e9))
            for slot, row in slots.items()
        }
        first = next(iter(slots))
        self._raise = late.raise_signal.warmup(self._theirs[first], grid=(1,), num_warps=1)
        self._await = late.await_signal.warmup(*self._waits[first], grid=(1,), num_warps=1)
        for name in names:  # loads the kernels: nothing may be loaded while one spins
            self.signal(axis, name, here)
            self.wait(axis, name, here)
        torch.cuda.synchronize()

    def signal(self, axis: str, name: str, peer: int) -> None:
        """Adds one to the peer's counter, once the work so far on the current stream is done."""
        self._raise[ONE](self._theirs[name, peer])

    def wait(self, axis: str, name: str, peer: int) -> None:
        """What follows on the current stream starts after one more signal from the peer."""
        self._await[ONE](*self._waits[name, peer])

    def check(self) -> None:
        """Raises HangError for a wait that was given up; call it when the stream's results are
        there.
        """
        for (name, peer), slot in self._slots.items():
            if self._late[slot, 0]:
                raise HangError(
                    f"rank {self._rank} waited {self._timeout_s:g} s for signal {name!r} from "
                    f"rank {self._team[peer]} over mesh axis {self._axis!r}",
                    expected="the peer to come so far within that time",
                    remedy="see what holds it up; if it is only slow, raise "
                    + argument("timeout_s"),
                )
