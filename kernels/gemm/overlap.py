"""Matmuls with their collective beside them: each launches one kernel, and copy engines bring and
take rows while it runs.

In: bf16 operands, a Workspace. Out: results of this rank. A gather pushes this rank's rows into the
peers' symmetric buffers, each copy followed by its event word. A sending kernel counts the tiles of
each band of rows that it has stored, by parts of it; copies, queued behind waits for these counts,
push the parts into the symmetric buffers of those who want them, each followed by an event word.
Where copies would end too late, partial results are pushed by the kernel itself, an event word a
tile; so are sums of the last tiles, which all programs finish at one time.
Next: device/kernel.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from distmega.errors import HangError
from distmega.kernels.gemm.device.spec import WORDS, MatmulSpec
from distmega.kernels.gemm.device.start import Peering, launch_matmul
from distmega.kernels.gemm.times.matmul_ways import MatmulChoice
from distmega.kernels.gemm.times.tile_times import (
    GATHERED,
    PUSHED,
    TILE_ROWS,
    SendPlan,
    Tiles,
    copied_rows,
    count_helpers,
    order_turns,
    plan_sending,
)
from distmega.kernels.gemm.workspace import Workspace
from distmega.kernels.runtime.gpus import num_sms
from distmega.program.expr import Expr
from distmega.sharding.overlap.products import Extents


class Stuck:
    """What a debug build leaves when a wait expires; nothing otherwise."""

    def __init__(self, device: torch.device, debug: bool) -> None:
        self.words = torch.zeros(1, dtype=torch.int32, device=device) if debug else None

    def check(self, workspace: Workspace) -> None:
        """Raises HangError if a wait of the launch expired; waits for the launch."""
        if self.words is None:
            return
        if index := int(self.words):
            raise HangError(
                f"rank {workspace.rank} waited for event {index - 1}",
                expected=f"rank {(index - 1) // WORDS.value} to write it",
                remedy="see that all ranks make the same calls in the same order",
            )


def gather_rows(own: Tensor, workspace: Workspace, parts: Sequence[int]) -> None:
    """Starts the copies of own [M / num_ranks, K] into all peers' symmetric buffers, in parts of so
    many rows, the nearest neighbour of the ring first, as its kernel asks for them.
    """
    rank, row_bytes = workspace.rank, own.shape[1] * own.element_size()
    first = rank * own.numel() * own.element_size()
    for step in range(1, workspace.num_ranks):
        peer = (rank - step) % workspace.num_ranks
        buffer = workspace.symmetric_address(peer) + first
        start = 0
        for word, rows in enumerate(parts):
            num_bytes = rows * row_bytes
            workspace.send(buffer + start, own.data_ptr() + start, num_bytes)
            workspace.tell(peer, word)
            start += num_bytes


def all_gather_matmul(
    own: Tensor,
    b: Tensor,
    workspace: Workspace,
    choice: MatmulChoice,
    *,
    mixes: Expr | None = None,
    is_final: bool = False,
    debug: bool = False,
) -> Tensor:
    """C [M, N] for own [M / num_ranks, K], b [N, K]; the kernel starts with this rank's rows. With
    `mixes`, of MatmulSpec, [M, N / 2]. is_final: nobody will write into own.
    """
    assert choice.tiles is not None
    own = own.contiguous()
    workspace.begin()
    workspace.follow()
    extents = Extents(
        rows=own.shape[0] * workspace.num_ranks,
        columns=b.shape[0],
        depth=own.shape[1],
        num_ranks=workspace.num_ranks,
    )
    parts = copied_rows(extents, choice.tiles)
    buffer = workspace.buffer((extents.rows, extents.depth), own.dtype)
    gather_rows(own, workspace, parts)
    columns = extents.columns if mixes is None else extents.columns // 2
    out = torch.empty(extents.rows, columns, dtype=own.dtype, device=own.device)
    stuck = Stuck(own.device, debug)
    tiles, sms = choice.tiles, num_sms(own.device.index)
    helpers = count_helpers(extents, tiles.tile_n, choice.split, sms)
    pieces = None
    if helpers:
        pieces = own.new_empty(GATHERED * (sms - helpers) * TILE_ROWS, tiles.tile_n)
    peering = Peering(
        rank=workspace.rank,
        own=own,
        home=pieces,
        helpers=helpers,
        given=choice.split.given,
        fewer=choice.split.fewer,
        arrivals=workspace.arrivals,
        arrival_rows=parts[0],
        counts=workspace.counts,
        buffers=workspace.buffers,
        words=workspace.pushed,
    )
    spec = _spec(tiles, workspace, gathers=True, mixes=mixes, debug=debug)
    launch_matmul(buffer, b, out, spec, tiles.group, peering, stuck.words)
    workspace.end(range(len(parts)), copied=own, is_final=is_final)
    stuck.check(workspace)
    return out


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, workspace: Workspace, choice: MatmulChoice, *, debug: bool = False
) -> Tensor:
    """This rank's rows [M / num_ranks, N] of the sum over ranks of A B^T; a [M, K], b [N, K]."""
    out = torch.empty(a.shape[0] // workspace.num_ranks, b.shape[0], dtype=a.dtype, device=a.device)
    _send(a, b, out, workspace, choice, debug)
    return out


def matmul_all_reduce(
    a: Tensor, b: Tensor, workspace: Workspace, choice: MatmulChoice, *, debug: bool = False
) -> Tensor:
    """The sum over ranks of A B^T, [M, N], the same bits on all ranks; a [M, K], b [N, K].

    The result lies in the workspace, until the second call after this one.
    """
    return _send(a, b, None, workspace, choice, debug)


def send_rows(plan: SendPlan, home: Tensor, workspace: Workspace) -> list[int]:
    """Queues the copies that follow a sending kernel, in its order of bands; home: its symmetric
    buffer. Gives the counts that they wait for.
    """
    rank, bands = workspace.rank, plan.num_bands
    row_bytes = home.shape[1] * home.element_size()
    tile_bytes = plan.tiles.tile_n * home.element_size()
    band_bytes = plan.tiles.group * TILE_ROWS * row_bytes
    results = home.shape[0] // 2 * row_bytes
    counts = []
    for chunk, band in order_turns(bands, rank, plan.lag, workspace.num_ranks):
        if chunk == rank and not plan.shares:
            continue
        for part, columns in enumerate(plan.part_columns(chunk == rank and band == bands - 1)):
            index = (chunk * bands + band) * plan.num_parts + part
            counts.append(index)
            workspace.await_count(index, columns * plan.tiles.group)
            left = part * plan.part * tile_bytes
            lies = results + (chunk * bands + band) * band_bytes + left
            source = workspace.symmetric_address(rank) + lies
            width = min(columns * tile_bytes, row_bytes - left)
            for peer in [chunk] if chunk != rank else workspace.peers:
                to = (rank * bands + band) * band_bytes + left if chunk != rank else lies
                to += workspace.symmetric_address(peer)
                workspace.send_columns(to, source, width, row_bytes, band_bytes // row_bytes)
                if chunk != rank:
                    workspace.tell(chunk, band * plan.num_parts + part)
    if plan.shares:
        for peer in workspace.peers:
            workspace.tell(peer, plan.num_words)
    return counts


def _send(
    a: Tensor,
    b: Tensor,
    out: Tensor | None,
    workspace: Workspace,
    choice: MatmulChoice,
    debug: bool,
) -> Tensor:
    assert choice.tiles is not None
    workspace.begin()
    workspace.follow()
    rows, columns = a.shape[0], b.shape[0]
    home = workspace.buffer((2 * rows, columns), a.dtype)
    result = home[rows:] if out is None else out
    extents = Extents(rows=rows, columns=columns, depth=a.shape[1], num_ranks=workspace.num_ranks)
    plan = plan_sending(
        extents,
        choice.tiles,
        num_sms(a.device.index),
        lag=choice.lag,
        parts=choice.parts,
        split=choice.split,
        shares=out is None,
    )
    sends = "all" if plan.shares else "push" if choice.pushes else "scatter"
    spec = _spec(plan.tiles, workspace, sends=sends, debug=debug)
    stuck = Stuck(a.device, debug)
    peering = Peering(
        rank=workspace.rank,
        lag=plan.lag,
        part=plan.part,
        arrivals=workspace.arrivals,
        home=home,
        aways=workspace.peer_buffers(home.shape, home.dtype) if choice.pushes else (),
        counts=workspace.counts,
        late=plan.num_tiles - plan.num_late,
        buffers=workspace.buffers,
        words=workspace.pushed,
        helpers=plan.num_helpers,
        given=plan.split.given,
        fewer=plan.split.fewer,
    )
    launch_matmul(a, b, result, spec, plan.tiles.group, peering, stuck.words)
    counts: list[int] = []
    words: list[int] = []
    if not choice.pushes:
        counts = send_rows(plan, home, workspace)
        words += range(plan.num_words)
    stuck.check(workspace)
    if plan.shares:
        words.append(plan.num_words)
        workspace.await_peers(plan.num_words)
    if plan.num_late:
        words.append(PUSHED)
        workspace.await_peers(PUSHED, plan.num_late)
    workspace.end(words, counts)
    return result


def _spec(
    tiles: Tiles,
    workspace: Workspace,
    *,
    gathers: bool = False,
    sends: str = "",
    mixes: Expr | None = None,
    debug: bool,
) -> MatmulSpec:
    return MatmulSpec(
        tile_n=tiles.tile_n,
        stages=tiles.stages,
        num_ranks=workspace.num_ranks,
        gathers=gathers,
        sends=sends,
        mixes=mixes,
        debug=debug,
    )
