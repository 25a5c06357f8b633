"""How one element of a row is chosen: the largest, or one sampled at random among the most likely.

Torch functions of the kinds argmax, top, cutoff and sample, for ops.py and for the CPU
megakernel's instructions. A sample is the argmax of logit + temperature * Gumbel noise, and the
noise comes from a counter-based generator (Philox4x32-10) keyed by the seed and counted by position
and index: the same on any number of ranks, whoever computes it. On a GPU nothing asks the device
for a number or copies one to it, so that a CUDA graph can hold these functions once they have run.
"""

import math
from functools import cache

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def argmax(x: Tensor, base: int = 0, extent: int | None = None) -> tuple[Tensor, Tensor]:
    """Largest element of the last dim and its index plus `base`, the lowest on ties; NaN if any is.

    x holds indices from `base` on; those not below `extent` are padding. With nothing but padding:
    least value, `base`.
    """
    num_valid = x.shape[-1] if extent is None else max(0, min(x.shape[-1], extent - base))
    if num_valid:
        value, index = x[..., :num_valid].max(-1)
        return value, index + base
    least = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    index = torch.full(x.shape[:-1], base, dtype=torch.int64, device=x.device)
    return torch.full(x.shape[:-1], least, dtype=x.dtype, device=x.device), index


def top(x: Tensor, num_parts: int, num_top: int) -> Tensor:
    """The num_top largest of each of num_parts equal parts of rows [m, v], largest first."""
    parts = x.reshape(x.shape[0], num_parts, -1)
    return parts.topk(num_top, -1).values


def cutoff(x: Tensor, settings: Tensor) -> Tensor:
    """limits [m, 2] f32 of candidates x [m, ...] under settings [m, 3]; see ops.cutoff.

    A temperature of 0 leaves the largest alone. Probabilities are summed in float64, largest first.
    """
    ordered = x.flatten(1).float().sort(-1, descending=True).values
    wide, ranking = ordered.double(), torch.arange(ordered.shape[1], device=x.device)
    temperature, top_k, top_p = settings.double().unsqueeze(-1).unbind(1)
    num = ordered.shape[1]
    last = top_k.masked_fill(top_k <= 0, num).clamp(max=num).long() - 1
    likely = wide >= wide.gather(1, last)
    heat = temperature.clamp(min=torch.finfo(torch.float32).tiny)
    weights = torch.exp((wide - wide[:, :1]) / heat).masked_fill(~likely, 0.0)
    above = weights.cumsum(-1) - weights
    within = above < top_p * weights.sum(-1, keepdim=True)
    kept = likely & (within | (top_p >= 1) | (ranking == 0))
    num_kept = kept.sum(-1, keepdim=True).clamp(min=1)  # none where the largest is NaN
    least = ordered.gather(1, num_kept - 1)
    return torch.cat((settings[:, :1], least), 1)


def sample(
    x: Tensor, limits: Tensor, seeds: Tensor, positions: Tensor, base: int, extent: int
) -> tuple[Tensor, Tensor]:
    """Sampled index of rows x [m, v] and its value f32, logit + temperature * noise, [m]; see
    ops.sample. base, extent: as of argmax.

    Noise is made for what is kept, on other devices than the CPU for all: there the host would have
    to wait to learn how much is kept.
    """
    kept = ~(x.float() < limits[:, 1:])  # NaN too, which then is what is sampled
    if x.is_cpu:
        rows, columns = kept.nonzero(as_tuple=True)
        values = torch.full(x.shape, -math.inf, device=x.device)
        heat, given = limits[rows, 0], (seeds[rows], positions[rows], columns + base)
        values[rows, columns] = _add_noise(x[rows, columns], heat, *given)
    else:
        values = sample_values(x, kept, limits, seeds, positions, base)
    return argmax(values, base, extent)


def sample_values(
    x: Tensor, kept: Tensor, limits: Tensor, seeds: Tensor, positions: Tensor, base: int
) -> Tensor:
    """What `sample` takes the largest of, [m, v] f32, -inf where not kept."""
    columns = torch.arange(base, base + x.shape[1], device=x.device)
    values = _add_noise(x, limits[:, :1], seeds.unsqueeze(1), positions.unsqueeze(1), columns)
    return values.masked_fill(~kept, -math.inf)


def _add_noise(x: Tensor, heat: Tensor, seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """x + heat * noise, f32, of operands that broadcast."""
    return (x.double() + heat.double() * gumbel(seeds, positions, ids)).float()


def gumbel(seeds: Tensor, positions: Tensor, indices: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, of i64 tensors that broadcast: -log(-log(1 - u)).

    u = (r + 1/2) / 2^32, r being the first Philox word of counter (index, position, 0, 0) and key
    seed. Small u are exact in fp32 too, so a kernel in fp32 has the same large values.
    """
    u = (philox(seeds, positions, indices).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u))


def philox(seeds: Tensor, positions: Tensor, indices: Tensor) -> Tensor:
    """First word, as i64, of Philox4x32-10 at counter (index, position, 0, 0) with key seed.

    Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    given = seeds, positions, indices
    seeds, positions, indices = torch.broadcast_tensors(*given)  # type: ignore[no-untyped-call]
    multipliers, weyl = (
        _constant(pair, indices.device).view(2, *[1] * indices.dim())
        for pair in (MULTIPLIERS, WEYL)
    )
    counter = torch.stack((indices, torch.zeros_like(indices)))
    others = torch.stack((positions, torch.zeros_like(positions)))
    keys = torch.stack((seeds, seeds >> 32))
    for _ in range(ROUNDS):
        # products wrap to 64 bits, which keeps all of them
        products = (counter * multipliers).flip(0)
        counter = ((products >> 32) ^ others ^ keys) & MASK
        others, keys = products, keys + weyl
    return counter[0]


@cache
def _constant(pair: tuple[int, int], device: torch.device) -> Tensor:
    """The pair as i64 on a device, copied there once."""
    return torch.tensor(pair, device=device)
