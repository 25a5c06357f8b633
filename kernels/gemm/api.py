"""Matmuls with a collective before or after: `matmul`, `all_gather_matmul`,
`matmul_reduce_scatter`, `matmul_all_reduce` of `distmega.kernels`.

In: a [M, K] and b [N, K] of one type on one device, b as a linear layer holds its weight. Out: new
tensors A B^T. On Hopper GPUs in bf16 the model of times/matmul_ways.py chooses: the kernel of this
package, alone (device/start.py) or with the collective beside it (overlap.py), or torch's matmul
and a collective by peer memory (peer_collectives.py) or by NCCL, in turn. Elsewhere it is torch's
matmul and the communicator's collective. All ranks of a team make the same calls in the same order.
Next: overlap.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from distmega.arguments import shown
from distmega.env import read_settings
from distmega.errors import ProgramError, counted
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.comm.nccl import NcclCommunicator
from distmega.hostir.comm.torch_names import all_gather_single, reduce_scatter_single
from distmega.kernels.gemm import late
from distmega.kernels.gemm.machine import built_in, measured
from distmega.kernels.gemm.times.matmul_ways import (
    MIXED_COLUMNS,
    MatmulChoice,
    Means,
    choose_means,
    choose_mixed_tiles,
    choose_tiles,
    kernel_problem,
    tiles_choice,
)
from distmega.kernels.gemm.times.ways import rates_of
from distmega.kernels.pipelined.api import normalise_rows, pointwise_results
from distmega.kernels.pipelined.operands import FLOATS, WHOLE, require_exprs, require_tensor
from distmega.kernels.pipelined.pointwise.exprs import formula_of
from distmega.kernels.runtime.compilations import has_triton
from distmega.kernels.runtime.gpus import is_hopper, made_current
from distmega.kernels.runtime.memory import has_tma_rows, tma_rows
from distmega.program.expr import Expr, num_args
from distmega.sharding.layout.mesh import DeviceMesh
from distmega.sharding.overlap.pairs import PairKind
from distmega.sharding.overlap.products import Collective, Extents

PRODUCTS = FLOATS | {torch.complex64, torch.complex128}
COLLECTIVES: Mapping[PairKind, Collective] = {
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "reduce_scatter",
    "matmul_all_reduce": "all_reduce",
}


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor | None = None,
    mixes: str | Expr | None = None,
    other: Tensor | None = None,
) -> Tensor:
    """A B^T, [M, N] for a [M, K] and b [N, K], into `out` if given. ProgramError if shapes do not
    fit.

    mixes: an expression of a0 and a1, columns n and N / 2 + n of the product, which is column n of
    the result, [M, N / 2]: silu(a0) * a1 of one weight above another.
    other: where the two lie apart, the second of them; both are [N / 2, K] then.
    """
    formula = _check(a, b, mixes, other)
    shape = (a.shape[0], b.shape[0] // (1 if formula is None or other is not None else 2))
    if out is not None:
        require_tensor("out", out)
    if out is not None and (out.shape, out.dtype, out.device) != (shape, a.dtype, a.device):
        raise ProgramError(
            f"out of shape {list(out.shape)} and type {out.dtype} on {out.device}",
            expected=f"{list(shape)} of {a.dtype} on {a.device}",
            remedy="leave it out to get a new tensor",
        )
    tiles = None
    if _on_hopper(a):
        rates = rates_of(built_in(a.device.index))
        if formula is None:
            tiles = choose_tiles(_extents(a, b), rates)
        else:
            extents = replace(_extents(a, b), columns=2 * shape[1])
            tiles = choose_mixed_tiles(extents, rates, apart=other is not None)
    if tiles is None or not (out is None or has_tma_rows(out)):
        if formula is None:
            return torch.mm(a, b.T, out=out)
        if other is None:
            found = mix_columns(torch.mm(a, b.T), formula)
        else:
            found = mix_halves((torch.mm(a, b.T), torch.mm(a, other.T)), formula)
        return found if out is None else out.copy_(found)
    start = late.start
    result = a.new_empty(shape) if out is None else out
    with made_current(a.device):
        spec = start.plain_spec(tiles, formula, apart=other is not None)
        below = None if other is None else tma_rows(other)
        operands = tma_rows(a), tma_rows(b), result
        start.launch_matmul(*operands, spec, tiles.group, other=below)
    return result


def mix_columns(product: Tensor, formula: Expr | None) -> Tensor:
    """One column of columns n and N / 2 + n of a product [M, N] by a formula, if there is one."""
    return product if formula is None else mix_halves(product.chunk(2, 1), formula)


def mix_halves(halves: Sequence[Tensor], formula: Expr) -> Tensor:
    """A formula of two halves of a product."""
    (found,) = pointwise_results([formula], halves)
    return found


def all_gather_matmul(
    own: Tensor,
    b: Tensor,
    comm: Communicator,
    axis: str = "tp",
    *,
    replicated: bool = False,
    overlap: bool | None = None,
    workspace: "late.Workspace | None" = None,
    mixes: str | Expr | None = None,
    is_final: bool = False,
) -> Tensor:
    """A B^T, [M, N], where member r of the mesh axis has rows r M / ranks to (r + 1) M / ranks of A
    in `own`, and b [N, K] is its own.

    replicated: all have the same b, and want the same result bit by bit. overlap: True for the
    kernel that overlaps, False for NCCL's collective after torch's matmul, by default what is
    expected to be fastest. workspace: of the axis, large enough; by default the team's own.
    is_final: nobody writes into the memory of `own` any more, so what follows need not wait until
    all ranks have a copy of it. mixes: as matmul. ProgramError if shapes do not fit, or can't
    overlap when forced.
    """
    _require_communicator(comm)
    require_tensor("own", own)
    formula = _check(own, b, mixes)
    num_ranks = comm.mesh.size(axis)
    extents = _extents(own, b, num_ranks, rows=own.shape[0] * num_ranks)
    extents = replace(extents, replicated=replicated)
    choice = _choose("all_gather", own, comm, extents, overlap)
    if choice.means != "nccl":
        workspace = _workspace(workspace, comm, axis, 2 * extents.rows * extents.depth)
        if choice.means == "peer":
            whole = late.peer_collectives.all_gather(own, workspace, is_final=is_final)
            return mix_columns(torch.mm(whole, b.T), formula)
        gather = late.overlap.all_gather_matmul
        mixed = formula if extents.columns % MIXED_COLUMNS == 0 else None
        operands = tma_rows(own), tma_rows(b), workspace, choice
        made = gather(*operands, mixes=mixed, is_final=is_final)
        return made if mixed is not None else mix_columns(made, formula)
    full = own.new_empty(extents.rows, extents.depth)
    if group := _nccl(comm, axis):
        all_gather_single(full, own.contiguous(), group=group)
    else:
        comm.all_gather(axis, own, full, 0).wait()
    return mix_columns(torch.mm(full, b.T), formula)


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    comm: Communicator,
    axis: str = "tp",
    *,
    overlap: bool | None = None,
    workspace: "late.Workspace | None" = None,
) -> Tensor:
    """This rank's rows [M / ranks, N] of the sum over ranks of A B^T; a [M, K], b [N, K] are each
    rank's own. overlap, workspace, ProgramError: as all_gather_matmul.
    """
    _require_communicator(comm)
    _check(a, b)
    extents = _extents(a, b, comm.mesh.size(axis))
    if extents.rows % extents.num_ranks:
        raise ProgramError(
            f"{counted(extents.rows, 'row')} to scatter over {counted(extents.num_ranks, 'rank')}",
            expected="a multiple of the ranks",
            remedy="pad A",
        )
    choice = _choose("reduce_scatter", a, comm, extents, overlap)
    if choice.means != "nccl":
        workspace = _workspace(workspace, comm, axis, 4 * a.shape[0] * b.shape[0])
        if choice.means == "peer":
            return late.peer_collectives.matmul_reduce_scatter(a, b, workspace)
        a, b = tma_rows(a), tma_rows(b)
        return late.overlap.matmul_reduce_scatter(a, b, workspace, choice)
    partial = torch.mm(a, b.T)
    result = partial.new_empty(extents.rows // extents.num_ranks, extents.columns)
    if group := _nccl(comm, axis):
        reduce_scatter_single(result, partial, group=group)
    else:
        comm.reduce_scatter(axis, partial, result, 0, "sum").wait()
    return result


def matmul_all_reduce(
    a: Tensor,
    b: Tensor,
    comm: Communicator,
    axis: str = "tp",
    *,
    overlap: bool | None = None,
    borrow: bool = False,
    workspace: "late.Workspace | None" = None,
) -> Tensor:
    """The sum over ranks of A B^T, [M, N]; a [M, K], b [N, K] are each rank's own.

    borrow: the result may lie in memory that the second next call on the axis overwrites, which
    saves copying it. overlap, workspace, ProgramError: as all_gather_matmul.
    """
    _require_communicator(comm)
    _check(a, b)
    extents = _extents(a, b, comm.mesh.size(axis))
    choice = _choose("all_reduce", a, comm, extents, overlap)
    if choice.means != "nccl":
        workspace = _workspace(workspace, comm, axis, 4 * a.shape[0] * b.shape[0])
        if choice.means == "peer":
            result = late.peer_collectives.matmul_all_reduce(a, b, workspace)
            sizes = extents.rows, extents.columns, extents.num_ranks
            borrow |= late.peer_collectives.is_pushed(*sizes)
        else:
            a, b = tma_rows(a), tma_rows(b)
            result = late.overlap.matmul_all_reduce(a, b, workspace, choice)
        return result if borrow else result.clone()
    partial = torch.mm(a, b.T)
    if group := _nccl(comm, axis):
        dist.all_reduce(partial, group=group)
        return partial
    result = torch.empty_like(partial)
    comm.all_reduce(axis, [partial], [result], "sum").wait()
    return result


def matmul_sum_norm(
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    comm: Communicator,
    axis: str = "tp",
    *,
    kind: Literal["rms_norm", "layer_norm"],
    eps: float,
    workspace: "late.Workspace | None" = None,
) -> tuple[Tensor, Tensor]:
    """The norm of residual + the sum over ranks of A B^T, times weight and plus bias, and that
    total, both [M, N]; a [M, K], b [N, K] are each rank's own, residual [M, N], weight and bias [N]
    the same on all. workspace, ProgramError: as all_gather_matmul.
    """
    _require_communicator(comm)
    _check(a, b)
    extents = _extents(a, b, comm.mesh.size(axis))
    if _choose("all_reduce", a, comm, extents, None).means == "peer":
        workspace = _workspace(workspace, comm, axis, 4 * a.shape[0] * b.shape[0])
        vectors = (weight,) if bias is None else (weight, bias)
        if late.peer_collectives.sums_rows(extents, residual, vectors):
            return late.peer_collectives.matmul_sum_norm(
                a, b, residual, weight, bias, kind, eps, workspace
            )
    total = matmul_all_reduce(a, b, comm, axis, borrow=True, workspace=workspace)
    return normalise_rows(kind, total, residual, weight, bias, eps)


def means_of(
    kind: PairKind,
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    axis: str = "tp",
    *,
    replicated: bool = False,
    overlap: bool | None = None,
) -> Means:
    """By what means the function for a pair does it, of x [rows, K] and w [N, K] of each rank: the
    same on all ranks. replicated, overlap, ProgramError: as of the functions.
    """
    num_ranks = comm.mesh.size(axis)
    rows = x.shape[0] * (num_ranks if kind == "all_gather_matmul" else 1)
    extents = replace(_extents(x, w, num_ranks, rows=rows), replicated=replicated)
    return _choose(COLLECTIVES[kind], x, comm, extents, overlap).means


def _check(
    a: Tensor, b: Tensor, mixes: str | Expr | None = None, other: Tensor | None = None
) -> Expr | None:
    """The formula by which columns are mixed, if any; ProgramError for what does not fit."""
    require_tensor("a", a)
    require_tensor("b", b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ProgramError(
            f"matmul of shapes {list(a.shape)} and {list(b.shape)}",
            expected="[M, K] and [N, K]",
            remedy="flatten leading dims, transpose the weight",
        )
    if a.dtype != b.dtype or a.device != b.device:
        raise ProgramError(
            f"matmul of {a.dtype} on {a.device} and {b.dtype} on {b.device}",
            expected="one type and device",
            remedy="convert or move one",
        )
    if a.dtype not in PRODUCTS and not (a.device.type == "cpu" and a.dtype in WHOLE):
        raise ProgramError(
            f"matmul of {a.dtype} on {a.device}",
            expected="floating-point or complex numbers of 16 bits and more, on a CPU whole ones",
            remedy="convert both",
        )
    if other is not None:
        require_tensor("other", other)
    if other is not None and (
        mixes is None or (other.shape, other.dtype, other.device) != (b.shape, b.dtype, b.device)
    ):
        raise ProgramError(
            f"a second weight of shape {list(other.shape)} and type {other.dtype}",
            expected=f"{list(b.shape)} of {b.dtype}, and `mixes`",
            remedy="give both weights the same shape, and say what is made of their products",
        )
    if mixes is None:
        return None
    require_exprs([mixes])
    formula = formula_of((mixes,)).exprs[0]
    if (other is None and b.shape[0] % 2) or num_args(formula) > 2:
        raise ProgramError(
            f"{mixes} of {counted(b.shape[0], 'column')}",
            expected="an even number of columns and an expression of a0 and a1",
            remedy="put one weight [N / 2, K] above the other",
        )
    return formula


def _require_communicator(comm: object) -> None:
    if not isinstance(getattr(comm, "mesh", None), DeviceMesh):
        raise ProgramError(
            f"comm {shown(comm)}",
            expected="a communicator of the ranks of a mesh",
            remedy="make one on every rank: NcclCommunicator(mesh, rank) of distmega.hostir",
        )


def _extents(a: Tensor, b: Tensor, num_ranks: int = 1, rows: int = 0) -> Extents:
    return Extents(
        rows=rows or a.shape[0], columns=b.shape[0], depth=a.shape[1], num_ranks=num_ranks
    )


def _nccl(comm: Communicator, axis: str) -> dist.ProcessGroup | None:
    """The NCCL group of an axis, if its order is the team's."""
    if not isinstance(comm, NcclCommunicator) or comm.mesh.size(axis) == 1:
        return None
    group, team_ranks = comm.group(axis)
    return group if list(team_ranks) == list(range(len(team_ranks))) else None


def _choose(
    collective: Collective,
    x: Tensor,
    comm: Communicator,
    extents: Extents,
    forced: bool | None,
) -> MatmulChoice:
    """Decided by what is equal on all ranks."""
    if _on_hopper(x) and isinstance(comm, NcclCommunicator):
        rates = rates_of(measured(comm))
        alone = _have_own_gpus()
        problem = kernel_problem(collective, extents, "bf16", rates)
        problem = problem or ("" if alone else "a GPU for each rank")
        if forced and not problem:
            return tiles_choice(collective, extents, rates)
        if forced is None and extents.num_ranks > 1:
            return choose_means(collective, extents, rates, beside=alone)
    else:
        problem = "bf16 on Hopper GPUs"
    if forced:
        raise ProgramError(
            f"overlap forced for {counted(extents.rows, 'row')},"
            f" {counted(extents.columns, 'column')} and depth {extents.depth} over"
            f" {counted(extents.num_ranks, 'rank')}, of {x.dtype} on {x.device}",
            expected=problem,
            remedy="pad the rows, or leave overlap out",
        )
    return MatmulChoice(means="nccl", us=0.0)


@cache
def _have_own_gpus() -> bool:
    """Whether ranks share none. Asked once, since reading all settings takes longer than a call."""
    return not read_settings().share_gpus


def _on_hopper(x: Tensor) -> bool:
    """Whether the kernel runs on x's device and type."""
    return x.is_cuda and x.dtype is torch.bfloat16 and has_triton() and is_hopper(x.device.index)


def _workspace(
    given: "late.Workspace | None", comm: Communicator, axis: str, symmetric_bytes: int
) -> "late.Workspace":
    """The given one, or the team's with such symmetric buffers."""
    assert isinstance(comm, NcclCommunicator)
    return given or late.workspace_of(comm, axis, symmetric_bytes)
