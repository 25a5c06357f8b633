"""Matmuls with their collective beside them: each launches one kernel, peers' rows come and go
while it runs.

In: bf16 operands, a Workspace. Out: results of this rank. A gather pushes this rank's rows into the
peers' rooms by copy engines, on a stream of its own, each copy followed by its event word; the
kernel stores partial results and sums into the peers' rooms itself. Next: kernel.py.
"""

import torch
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from distmega.errors import HangError
from distmega.kernels.gemm.choices import Extents, Tiles, event_rows
from distmega.kernels.gemm.launch import Peering, launch_matmul
from distmega.kernels.gemm.spec import MatmulSpec
from distmega.kernels.gemm.workspace import Workspace


class Stuck:
    """What a debug build leaves when a wait expires; nothing otherwise."""

    def __init__(self, device: torch.device, debug: bool) -> None:
        self.words = torch.zeros(3, dtype=torch.int32, device=device) if debug else None

    def check(self, workspace: Workspace) -> None:
        """Raises HangError if a wait of the launch expired; waits for the launch."""
        if self.words is None:
            return
        index, epoch, found = self.words.tolist()
        if index:
            raise HangError(
                f"rank {workspace.rank} waited for event {index - 1}, which holds {found}",
                expected=f"{epoch}, the number of the call, written by the rank that owes it",
                remedy="see that all ranks make the same calls in the same order",
            )


def gather_rows(own: Tensor, workspace: Workspace, rows: int) -> None:
    """Starts the copies of own [M / num_ranks, K] into all peers' rooms, `rows` at a time, the
    nearest neighbour of the ring first, as its kernel asks for them.
    """
    count = own.shape[0]
    shape = (count * workspace.num_ranks, own.shape[1])
    first = workspace.rank * count
    workspace.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(workspace.stream):
        for step in range(1, workspace.num_ranks):
            peer = (workspace.rank - step) % workspace.num_ranks
            room = workspace.room(peer, shape, own.dtype)
            words = workspace.arrivals(peer)
            for start in range(0, count, rows):
                room[first + start : first + start + rows].copy_(own[start : start + rows])
                word = (first + start) // rows
                _SymmetricMemory.stream_write_value32(words, word, workspace.epoch)


def all_gather_matmul(
    own: Tensor, b: Tensor, workspace: Workspace, tiles: Tiles, *, debug: bool = False
) -> Tensor:
    """C [M, N] for own [M / num_ranks, K], b [N, K]; the kernel starts with this rank's rows."""
    workspace.epoch += 1
    extents = Extents(
        rows=own.shape[0] * workspace.num_ranks,
        columns=b.shape[0],
        depth=own.shape[1],
        num_ranks=workspace.num_ranks,
    )
    rows = event_rows(extents)
    gather_rows(own, workspace, rows)
    out = torch.empty(extents.rows, extents.columns, dtype=own.dtype, device=own.device)
    stuck = Stuck(own.device, debug)
    peering = Peering(
        rank=workspace.rank,
        epoch=workspace.epoch,
        own=own,
        arrivals=workspace.arrivals(workspace.rank).view(torch.int32),
        arrival_rows=rows,
        events=workspace.events(workspace.rank),
        rooms=workspace.rooms,
        peers=workspace.peers,
    )
    room = workspace.room(workspace.rank, (extents.rows, extents.depth), own.dtype)
    spec = _spec(tiles, workspace, gathers=True, debug=debug)
    launch_matmul(room, b, out, spec, peering, stuck.words)
    torch.cuda.current_stream().wait_stream(workspace.stream)
    stuck.check(workspace)
    return out


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, workspace: Workspace, tiles: Tiles, *, debug: bool = False
) -> Tensor:
    """This rank's rows [M / num_ranks, N] of the sum over ranks of A B^T; a [M, K], b [N, K]."""
    out = torch.empty(a.shape[0] // workspace.num_ranks, b.shape[0], dtype=a.dtype, device=a.device)
    _send(a, b, out, workspace, tiles, "scatter", debug)
    return out


def matmul_all_reduce(
    a: Tensor, b: Tensor, workspace: Workspace, tiles: Tiles, *, debug: bool = False
) -> Tensor:
    """The sum over ranks of A B^T, [M, N], the same bits on all ranks; a [M, K], b [N, K].

    The result lies in the workspace, until the second call after this one.
    """
    return _send(a, b, None, workspace, tiles, "all", debug)


def _send(
    a: Tensor,
    b: Tensor,
    out: Tensor | None,
    workspace: Workspace,
    tiles: Tiles,
    sends: str,
    debug: bool,
) -> Tensor:
    workspace.epoch += 1
    rows, columns = a.shape[0], b.shape[0]
    home = workspace.room(workspace.rank, (2 * rows, columns), a.dtype)
    result = home[rows:] if out is None else out
    spec = _spec(tiles, workspace, sends=sends, debug=debug)
    stuck = Stuck(a.device, debug)
    peering = Peering(
        rank=workspace.rank,
        epoch=workspace.epoch,
        arrivals=workspace.arrivals(workspace.rank).view(torch.int32),
        home=home,
        events=workspace.events(workspace.rank),
        rooms=workspace.rooms,
        peers=workspace.peers,
    )
    launch_matmul(a, b, result, spec, peering, stuck.words)
    stuck.check(workspace)
    return result


def _spec(
    tiles: Tiles, workspace: Workspace, *, gathers: bool = False, sends: str = "", debug: bool
) -> MatmulSpec:
    return MatmulSpec(
        tile_n=tiles.tile_n,
        stages=tiles.stages,
        group=tiles.group,
        num_ranks=workspace.num_ranks,
        gathers=gathers,
        sends=sends,
        debug=debug,
    )
