"""The choice of an id, from the result of a linear: an argmax, or a sample within limits."""

from distmega.kernels.tasks.fuse.state import Fusion, does_not_fuse, num_ranks_of, out_of
from distmega.kernels.tasks.fuse.types import Fused, FusedChoice, FusedSample, Limits
from distmega.program.kinds import kind_of
from distmega.program.types import Op, contracts


def fuse_choice(fusion: Fusion, op: Op) -> Fused:
    """An id chosen from the result of a linear, or of pointwise ops behind it, by an argmax
    or a sample, gathered before or compared afterwards where several ranks have parts of it.
    """
    logits, num_ranks, ops = fusion.read(op, 0), 1, [op]
    source = logits
    gather = fusion.producers.get(logits)
    if gather is not None and kind_of(gather).gathers_all:
        source, num_ranks = fusion.read(gather, 0), num_ranks_of(gather)
        ops.append(gather)
    last = fusion.producers.get(source)
    if last is None or not (contracts(last) or kind_of(last).is_elementwise):
        raise does_not_fuse(op)
    chosen, num_logits = op.writes[1].tensor, fusion.tensors[logits].shape[-1]
    if op.get("base_axis", ""):
        compare = fusion.only_user(chosen)
        if compare is None or not kind_of(compare).sums_all:
            raise does_not_fuse(op)
        chosen, num_ranks = compare.writes[1].tensor, num_ranks_of(compare)
        ops.append(compare)
        extent = op.attr("extent")
        assert isinstance(extent, int)
        num_logits = extent
        logits = gathered_logits(fusion, source, ops)
    sampler = sampler_of(fusion, op, (source, logits)) if op.kind == "sample" else None
    fusion.take(*ops)
    return FusedChoice(
        name=op.name, source=source, logits=logits, chosen=chosen, num_logits=num_logits,
        num_ranks=num_ranks, sampler=sampler,
    )  # fmt: skip


def gathered_logits(fusion: Fusion, source: str, ops: list[Op]) -> str:
    """The logits of all ranks where somebody asks for them, else the rank's own."""
    for gather in fusion.users.get(source, []):
        if kind_of(gather).gathers_all:
            ops.append(gather)
            return out_of(gather)
    return source


def sampler_of(fusion: Fusion, sample: Op, logits: tuple[str, ...]) -> FusedSample:
    """How `sample` chooses: at a temperature, within limits or not. Where each rank samples
    from its own logits, limits come from candidates that all ranks gathered.
    """
    seeds, positions = fusion.read(sample, 2), fusion.read(sample, 3)
    cutoff = fusion.producers.get(fusion.read(sample, 1))
    if cutoff is None:
        return FusedSample(sampling=fusion.read(sample, 1), seeds=seeds, positions=positions)
    found, is_whole = fusion.read(cutoff, 0), not sample.get("base_axis", "")
    ops, gather = [cutoff], fusion.producers.get(found)
    if not is_whole and gather is not None and kind_of(gather).gathers_all:
        found, is_whole = fusion.read(gather, 0), True
        ops.append(gather)
    limits: Limits = "all"
    if found not in logits:
        top = fusion.producers.get(found)
        if top is None or top.kind != "top" or fusion.read(top, 0) not in logits:
            raise does_not_fuse(cutoff)
        limits = "candidates"
        ops.append(top)
    if not is_whole:
        raise does_not_fuse(cutoff)
    fusion.take(*ops)
    return FusedSample(
        sampling=fusion.read(cutoff, 1), seeds=seeds, positions=positions, limits=limits
    )
