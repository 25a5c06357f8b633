"""Blocks of a transformer as host programs: what plain torch gives, in every way of overlap."""

import pytest
import torch

from bench.blocks import TORCH, Shape, mlp_block, transformer_block
from distmega.hostir.comm.communicator import Communicator
from distmega.hostir.ir.matmul_nodes import FusedMatmul
from distmega.hostir.ir.nodes import walk_nodes
from distmega.kernels.machines import CPU, H200
from tests.multigpu.ranks import ON_EITHER

HERE = "tests.multigpu.test_blocks"
WAYS = {"cheapest": "", "kernel": "kernel", "ring": "ring", "sequential": "sequential"}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2}
"""Of the largest value: of sums in another order, of bf16 rounded at other places."""


def run_blocks(comm: Communicator) -> None:
    on_gpu = torch.get_default_device().type == "cuda"
    wide = Shape(rows=1024, hidden=1024, inner=2048, heads=4, group=2, head_dim=64)
    small = Shape(rows=16, hidden=16, inner=24, heads=2, group=2, head_dim=4)
    for make in (mlp_block, transformer_block):
        block = make(comm, wide if on_gpu else small, H200 if on_gpu else CPU, WAYS)
        fused = [n for n in walk_nodes(block.hosts["kernel"].body) if isinstance(n, FusedMatmul)]
        assert len(fused) == (2 if make is mlp_block else 4)
        wanted = block.calls[TORCH]().float()
        for name, call in block.calls.items():
            for _ in range(3):
                found = call()
            far = (found.float() - wanted).abs().max() / wanted.abs().max()
            assert far < TOLERANCE[found.dtype], (name, float(far))
            if on_gpu and name in block.hosts:
                nodes = block.evaluator(comm, name).run(block.tensors)["y"]
                assert torch.equal(call(), nodes), name


@pytest.mark.parametrize(("device", "num_ranks"), ON_EITHER)
def test_blocks_agree_with_torch(run_ranks, device: str, num_ranks: int):
    run_ranks(f"{HERE}:run_blocks", device, num_ranks)
