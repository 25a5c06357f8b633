"""Fuses the ops of a segment into the kinds of work that one persistent kernel does.

In: a segment (a Program) of one row, or of a row of each of several sequences, its collectives
included. Out: fused ops in an order in which each follows what it reads. The rules look at the
structure of ops and at who uses their results, never at names and never at one expression:

- a norm that contractions read becomes their prologue; if others take it too, the first of them
  also gives the normalised row;
- a chain of pointwise ops joins the epilogue of the contraction whose result it takes last;
- contractions of the same x whose results meet in one epilogue are streams of one contraction;
- contractions of the same x whose results leave as they are stand side by side in one;
- a sum over ranks, and the choice of a token, join the contraction before them;
- rotations, the norms before them and appends to caches join the attention that they serve;
- a gather of columns over ranks is a fused op of its own;
- experts: the choice of them is a fused op, their first matrices with what joins them one
  contraction whose rows lie where the choice says, their last ones one whose columns do; what an
  expert weighs stands before the last product, since it can be multiplied in on either side.
- a chain that takes no product, or a norm or softmax that no contraction takes in, is pointwise
  work on rows, whose first argument may be normalised.

What no rule takes is an error that names the op. Next on the walk: ../../hopper/row_plan/queues.py.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, TypeVar

from distmega.errors import UnsupportedError
from distmega.kernels.tasks.fuse.formulas import canonical, substitute
from distmega.kernels.tasks.fuse.types import (
    IDENTITY,
    ExpertSlots,
    Fused,
    FusedAttention,
    FusedChoice,
    FusedContraction,
    FusedEmbedding,
    FusedGather,
    FusedPointwise,
    FusedRouting,
    FusedSample,
    InputNorm,
    Limits,
    WeightStream,
)
from distmega.kernels.tasks.fuse.views import shown_by_views
from distmega.program import expr
from distmega.program.kinds import kind_of
from distmega.program.types import (
    Op,
    Program,
    contracts,
    grouped_index,
)

T = TypeVar("T")

TakesNorm = Callable[[InputNorm, int, bool], bool]
"""Whether contractions can do a norm of so many elements; the last says whether others than
contractions take its result, too.
"""


def takes_every_norm(norm: InputNorm, length: int, is_shared: bool) -> bool:
    """See TakesNorm."""
    return True


MAX_STREAMS = 2
"""Products of one x that meet in an epilogue, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """What contractions take in where a segment leaves the choice: the norm of their x; others of
    the same x beside them; at most so many streams.
    """

    norms: bool = True
    beside: bool = True
    streams: int = MAX_STREAMS


MOST = Joining()
"""The fewest fused ops."""


def fuse_segment(
    segment: Program, takes_norm: TakesNorm = takes_every_norm, joining: Joining = MOST
) -> tuple[Fused, ...]:
    """The fused ops of a segment; norms that contractions can't do are pointwise work of their own.
    UnsupportedError names the first op that no rule takes.
    """
    return _SegmentFusion(segment, takes_norm, joining).run()


def first_that_fits(
    segment: Program,
    build: Callable[[tuple[Fused, ...]], T],
    takes_norm: TakesNorm = takes_every_norm,
) -> T:
    """What `build` makes of the fewest fused ops that it takes: where it refuses these,
    contractions take in less. The first UnsupportedError where it takes none.
    """
    tried: list[tuple[Fused, ...]] = []
    refusal: UnsupportedError | None = None
    for norms, beside, streams in product((True, False), (True, False), (MAX_STREAMS, 1)):
        try:
            joining = Joining(norms=norms, beside=beside, streams=streams)
            fused = fuse_segment(segment, takes_norm, joining)
            if fused not in tried:
                tried.append(fused)
                return build(fused)
        except UnsupportedError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A linear with what stands around it: the norm before, the sum over ranks behind."""

    op: Op
    x: str
    norm: InputNorm | None
    out: str
    num_ranks: int
    ops: tuple[Op, ...]
    experts: ExpertSlots | None = None

    @property
    def stream(self) -> WeightStream:
        has_bias = contracts(self.op) and len(self.op.reads) == 3
        bias = self.op.reads[2].tensor if has_bias else ""
        return WeightStream(weights=(self.op.reads[1].tensor,), biases=(bias,))


class _SegmentFusion:
    """One pass over a segment. `taken`: ops that a fused op already contains."""

    def __init__(self, segment: Program, takes_norm: TakesNorm, joining: Joining) -> None:
        self.segment = segment
        self.takes_norm, self.joining = takes_norm, joining
        self.tensors = segment.tensor_map()
        self.shown = shown_by_views(segment)
        self.producers = {w.tensor: op for op in segment.ops for w in op.writes}
        self.users: dict[str, list[Op]] = {}
        for op in segment.ops:
            for name in dict.fromkeys(self.storage(read.tensor) for read in op.reads):
                if not (op.is_view and op.writes[0].tensor in self.shown):
                    self.users.setdefault(name, []).append(op)
        self.outputs = frozenset(map(self.storage, segment.outputs))
        self.position = {op.name: i for i, op in enumerate(segment.ops)}
        self.taken: set[str] = set()
        self.attended: list[str] = []
        """Queries, keys and values of each attention."""
        self.shared_norms: dict[tuple[str, InputNorm], str] = {}
        """Results of norms that others than contractions take, by what they are norms of."""

    def run(self) -> tuple[Fused, ...]:
        """Fused ops, each where all that it reads has been made."""
        rules: tuple[tuple[Callable[[Op], bool], Callable[[Op], Fused]], ...] = (
            (lambda op: kind_of(op).looks_up_rows, self.fuse_embedding),
            (_attends_to_caches, self.fuse_attention),
            (lambda op: op.kind in CHOICES, self.fuse_choice),
            (lambda op: op.kind == "route", self.fuse_routing),
            (lambda op: op.kind == "gather_rows", self.fuse_expert_rows),
            (lambda op: kind_of(op).is_elementwise, self.fuse_chain),
            (lambda op: op.kind == "scatter_add", self.fuse_expert_sum),
            (contracts, self.fuse_linear),
            (lambda op: kind_of(op).is_norm, self.fuse_norm),
            (lambda op: kind_of(op).gathers_all, self.fuse_gather),
        )
        found: list[tuple[int, Fused]] = []
        for fits, rule in rules:
            for op in self.segment.ops:
                if fits(op) and op.name not in self.taken and self.is_last(op):
                    found.append((self.position[op.name], rule(op)))
        for op in self.segment.ops:
            if op.name not in self.taken and not op.is_view:
                raise _unfit(op)
        return self.give_norms(fused for _, fused in sorted(found, key=lambda item: item[0]))

    def give_norms(self, found: Iterable[Fused]) -> tuple[Fused, ...]:
        """Fused ops, the first contraction that a shared norm is part of giving its result."""
        result: list[Fused] = []
        for op in found:
            if isinstance(op, FusedContraction) and op.norm:
                op = replace(op, normed=self.shared_norms.pop((op.x, op.norm), ""))
            result.append(op)
        return tuple(result)

    def is_last(self, op: Op) -> bool:
        """Whether no pointwise op goes on with the result of a pointwise op alone."""
        user = self.only_user(_out(op))
        return not kind_of(op).is_elementwise or user is None or not kind_of(user).is_elementwise

    def fuse_embedding(self, op: Op) -> Fused:
        out, num_ranks, ops = self.summed(op)
        if bool(op.get("base_axis", "")) != (num_ranks > 1):
            raise _unfit(op)
        gather = self.only_user(out)
        if gather is not None and kind_of(gather).gathers_all and num_ranks == 1:
            out, num_ranks, ops = _out(gather), _num_ranks(gather), (op, gather)
        self.take(*ops)
        return FusedEmbedding(
            name=op.name, ids=self.read(op, 0), table=self.read(op, 1), out=out, num_ranks=num_ranks
        )

    def fuse_linear(self, op: Op) -> Fused:
        """A linear whose result leaves as it is, and all others of the same x that do; what an
        attention takes lies as it does there.
        """
        first = self.product(op)
        together = [first]
        is_gathered = self.is_gathered(first.out)
        if first.num_ranks == 1 and self.joining.beside and not is_gathered:
            together = [
                one
                for user in self.users[self.read(op, 0)]
                if contracts(user) and user.name not in self.taken
                for one in [self.product(user)]
                if one.num_ranks == 1 and self.read(user, 0) == self.read(op, 0)
                if not self.is_gathered(one.out)
            ]
        order = {name: i for i, name in enumerate(self.attended)}
        together.sort(key=lambda one: order.get(one.out, len(order)))
        self.take(*(part for one in together for part in one.ops))
        streams = [one.stream for one in together]
        return FusedContraction(
            name=op.name,
            x=first.x,
            norm=first.norm,
            streams=(
                WeightStream(
                    weights=tuple(name for one in streams for name in one.weights),
                    biases=tuple(name for one in streams for name in one.biases),
                ),
            ),
            outs=tuple(one.out for one in together),
            num_ranks=first.num_ranks,
        )

    def fuse_gather(self, op: Op) -> Fused:
        """A gather of columns."""
        if op.attr("dim") != 1:
            raise _unfit(op)
        self.take(op)
        return FusedGather(name=op.name, x=self.read(op, 0), out=_out(op), num_ranks=_num_ranks(op))

    def is_gathered(self, name: str) -> bool:
        """Whether a gather takes a tensor that no fused op has yet."""
        users = self.users.get(name, [])
        return any(kind_of(user).gathers_all and user.name not in self.taken for user in users)

    def fuse_chain(self, op: Op) -> Fused:
        """A pointwise op with those before it whose results it alone takes, and the contraction
        that it follows last; others of the same x are streams beside it.
        """
        leaves: list[str] = []
        chain: list[Op] = []
        formula = self.formula(op, leaves, chain)
        products = {leaf: one for leaf in leaves for one in self.product_of(leaf)}
        if not products:
            return self.fuse_rows(op, formula, leaves, chain)
        last = max(products.values(), key=lambda one: self.position[one.ops[-1].name])
        beside = [
            leaf
            for leaf, one in products.items()
            if one is not last
            and one.num_ranks == last.num_ranks == 1
            and (one.x, one.norm) == (last.x, last.norm)
        ]
        if len(beside) >= self.joining.streams:
            beside = []
        streams = [leaf for leaf in leaves if leaf in beside or products.get(leaf) is last]
        operands = [leaf for leaf in leaves if leaf not in streams]
        order = {leaf: i for i, leaf in enumerate((*streams, *operands))}
        self.take(*chain, *(part for leaf in streams for part in products[leaf].ops))
        arguments = tuple(expr.Arg(order[leaf]) for leaf in leaves)
        return FusedContraction(
            name=op.name,
            x=last.x,
            norm=last.norm,
            streams=tuple(products[leaf].stream for leaf in streams),
            formula=canonical(substitute(formula, arguments)),
            operands=tuple(operands),
            outs=(_out(op),),
            num_ranks=last.num_ranks,
            experts=last.experts,
        )

    def fuse_routing(self, op: Op) -> Fused:
        """The choice of experts of each row: its largest scores, and the sorting of rows by expert,
        which leaves nothing to be done.
        """
        top = self.producers.get(self.read(op, 0))
        if top is None or top.kind != "top_k" or len(op.reads) > 1:
            raise _unfit(op)
        weights, chosen = (write.tensor for write in top.writes)
        shape = self.tensors[chosen].shape
        uses = {user.kind for user in self.users.get(weights, [])}
        sorts = {user.kind for write in op.writes for user in self.users.get(write.tensor, [])} - {
            "gather_rows",
            "grouped_linear",
            "scatter_add",
            "pointwise",
        }
        made = {write.tensor for one in (top, op) for write in one.writes}
        if self.only_user(chosen) is not op or uses - {"scatter_add"} or sorts:
            raise _unfit(top)
        if made & self.outputs:
            raise _unfit(op)
        self.take(top, op)
        return FusedRouting(
            name=op.name,
            scores=self.read(top, 0),
            num_experts=op.extents["g"],
            num_chosen=shape[1],
            weighing=str(top.attr("weights")),
        )

    def fuse_expert_rows(self, op: Op) -> Fused:
        """The first matrices of the experts that rows go to, and what joins their products."""
        products = self.users.get(_out(op), [])
        if not products or not all(map(_multiplies_groups, products)):
            raise _unfit(op)
        name, last = _out(products[0]), self.only_user(_out(products[0]))
        while last is not None and kind_of(last).is_elementwise:
            name, last = _out(last), self.only_user(_out(last))
        if last is None or not _multiplies_groups(last) or self.read(last, 0) != name:
            raise _unfit(last or products[0])
        total = self.only_user(_out(last))
        if total is None or total.kind != "scatter_add":
            raise _unfit(last)
        leaves: list[str] = []
        chain: list[Op] = []
        end = self.producers[name]
        formula: expr.Expr = IDENTITY
        if kind_of(end).is_elementwise:
            formula = self.formula(end, leaves, chain)
        streams = leaves or [name]
        known = {_out(one): one for one in products}
        if streams and (set(streams) != known.keys() or len(streams) > MAX_STREAMS):
            raise _unfit(end)
        if any(self.only_user(leaf) not in (*chain, last) for leaf in streams):
            raise _unfit(end)
        if any(_out(one) in self.outputs for one in (op, *products, *chain)):
            raise _unfit(op)
        x, norm = self.normed(self.read(op, 0), self.tensors[_out(op)].shape[-1])
        self.take(op, *products, *chain)
        return FusedContraction(
            name=end.name,
            x=x,
            norm=norm,
            streams=tuple(
                WeightStream(weights=(self.read(known[leaf], 1),), biases=("",)) for leaf in streams
            ),
            formula=canonical(expr.Call("mul", (formula, expr.Arg(len(streams))))),
            outs=(name,),
            experts=self.slots_of(total, products[0], "rows"),
        )

    def slots_of(self, total: Op, product: Op, by: Literal["rows", "columns"]) -> ExpertSlots:
        """The slots of what a scatter_add adds up, of experts whose matrices `product` takes. Where
        ranks have whole experts, their sum over these ranks must follow.
        """
        route = self.producers.get(self.read(total, 2))
        top = self.producers.get(self.read(total, 1))
        if route is None or top is None or self.producers.get(self.read(route, 0)) is not top:
            raise _unfit(total)
        axis = total.get("group_axis", "")
        _, _, ops = self.summed(total)
        if axis and ops[-1].get("mesh_axis", "") != axis:
            raise _unfit(total)
        return ExpertSlots(
            routing=route.name,
            by=by,
            num_experts=route.extents["g"],
            num_own=self.tensors[self.read(product, 1)].shape[0],
            num_chosen=self.tensors[self.read(total, 1)].shape[1],
        )

    def fuse_expert_sum(self, op: Op) -> Fused:
        """Experts whose sum leaves as it is."""
        product = self.product(op)
        self.take(*product.ops)
        return FusedContraction(
            name=op.name,
            x=product.x,
            norm=None,
            streams=(product.stream,),
            outs=(product.out,),
            num_ranks=product.num_ranks,
            experts=product.experts,
        )

    def fuse_rows(
        self, op: Op, formula: expr.Expr, leaves: Sequence[str], chain: Sequence[Op]
    ) -> Fused:
        """A chain without products, and the last of the norms that it alone takes, if any."""
        norms = [leaf for leaf in leaves if self.is_own_norm(leaf)]
        self.take(*chain)
        if not norms:
            return FusedPointwise(
                name=op.name, x="", norm=None, length=0, out=_out(op),
                formula=canonical(formula), operands=tuple(leaves),
            )  # fmt: skip
        last = max(norms, key=lambda leaf: self.position[self.producers[leaf].name])
        operands = tuple(leaf for leaf in leaves if leaf != last)
        order = {leaf: i for i, leaf in enumerate((last, *operands))}
        arguments = tuple(expr.Arg(order[leaf]) for leaf in leaves)
        alone = self.fuse_norm(self.producers[last])
        return replace(
            alone, name=op.name, out=_out(op), operands=operands,
            formula=canonical(substitute(formula, arguments)),
        )  # fmt: skip

    def is_own_norm(self, name: str) -> bool:
        """Whether a tensor is a norm or softmax that one op takes and no fused op has."""
        op = self.producers.get(name)
        if op is None or not kind_of(op).is_norm or op.name in self.taken:
            return False
        return self.only_user(name) is not None

    def fuse_norm(self, op: Op) -> FusedPointwise:
        """A norm or a softmax whose result is taken as it is."""
        self.take(op)
        plain = kind_of(op).statistics == "softmax"
        norm = InputNorm(weight="", eps=0.0, kind=op.kind) if plain else _norm(op)
        return FusedPointwise(
            name=op.name, x=self.read(op, 0), norm=norm, length=_reduced(op), out=_out(op)
        )

    def formula(self, op: Op, leaves: list[str], chain: list[Op]) -> expr.Expr:
        """What a chain of pointwise ops computes of `leaves`, which are appended as they come."""
        chain.append(op)
        size = self.size(_out(op))
        arguments: list[expr.Expr] = []
        num_starts = 0 if grouped_index(op) is None else 1  # read last
        for position in range(len(op.reads) - num_starts):
            name = self.read(op, position)
            before = self.producers.get(name)
            if self.size(name) != size:
                raise _unfit(op)
            if before and kind_of(before).is_elementwise and self.only_user(name) is op:
                arguments.append(self.formula(before, leaves, chain))
                continue
            if name not in leaves:
                leaves.append(name)
            arguments.append(expr.Arg(leaves.index(name)))
        return substitute(expr.parse(str(op.attr("expr"))), arguments)

    def product_of(self, name: str) -> Sequence[_Product]:
        """The linear, or sum of experts, whose result `name` is, if one op alone reads it and no
        fused op has it.
        """
        op = self.producers.get(name)
        if op is not None and kind_of(op).sums_all:
            op = self.producers.get(self.read(op, 0))
        if op is None or op.name in self.taken:
            return ()
        if not contracts(op) and op.kind != "scatter_add":
            return ()
        found = self.product(op)
        return (found,) if found.out == name and self.only_user(name) is not None else ()

    def product(self, op: Op) -> _Product:
        """A linear, or experts, with the norm of its x and the sum of its result over ranks."""
        if op.kind == "scatter_add":
            return self.expert_product(op)
        if not _is_by_rows(op):
            raise _unfit(op)
        x, norm = self.normed(self.read(op, 0), _reduced(op))
        out, num_ranks, ops = self.summed(op)
        return _Product(op=op, x=x, norm=norm, out=out, num_ranks=num_ranks, ops=ops)

    def expert_product(self, total: Op) -> _Product:
        """The last matrices of experts, with the sums over these and over ranks."""
        last = self.producers.get(self.read(total, 0))
        if last is None or not _multiplies_groups(last) or self.only_user(_out(last)) is not total:
            raise _unfit(total)
        out, num_ranks, ops = self.summed(total)
        return _Product(
            op=last,
            x=self.read(last, 0),
            norm=None,
            out=out,
            num_ranks=num_ranks,
            ops=(last, *ops),
            experts=self.slots_of(total, last, "columns"),
        )

    def fuse_choice(self, op: Op) -> Fused:
        """A token chosen from the result of a linear, or of pointwise ops behind it, by an argmax
        or a sample, gathered before or compared afterwards where several ranks have parts of it.
        """
        logits, num_ranks, ops = self.read(op, 0), 1, [op]
        source = logits
        gather = self.producers.get(logits)
        if gather is not None and kind_of(gather).gathers_all:
            source, num_ranks = self.read(gather, 0), _num_ranks(gather)
            ops.append(gather)
        last = self.producers.get(source)
        if last is None or not (contracts(last) or kind_of(last).is_elementwise):
            raise _unfit(op)
        token, vocab = op.writes[1].tensor, self.tensors[logits].shape[-1]
        if op.get("base_axis", ""):
            compare = self.only_user(token)
            if compare is None or not kind_of(compare).sums_all:
                raise _unfit(op)
            token, num_ranks = compare.writes[1].tensor, _num_ranks(compare)
            ops.append(compare)
            extent = op.attr("extent")
            assert isinstance(extent, int)
            vocab = extent
            logits = self.gathered(source, ops)
        sampler = self.sampler(op, (source, logits)) if op.kind == "sample" else None
        self.take(*ops)
        return FusedChoice(
            name=op.name, source=source, logits=logits, token=token, vocab=vocab,
            num_ranks=num_ranks, sampler=sampler,
        )  # fmt: skip

    def gathered(self, source: str, ops: list[Op]) -> str:
        """The logits of all ranks where somebody asks for them, else the rank's own."""
        for gather in self.users.get(source, []):
            if kind_of(gather).gathers_all:
                ops.append(gather)
                return _out(gather)
        return source

    def sampler(self, sample: Op, logits: tuple[str, ...]) -> FusedSample:
        """How `sample` chooses: at a temperature, within limits or not. Where each rank samples
        from its own logits, limits come from candidates that all ranks gathered.
        """
        seeds, positions = self.read(sample, 2), self.read(sample, 3)
        cutoff = self.producers.get(self.read(sample, 1))
        if cutoff is None:
            return FusedSample(sampling=self.read(sample, 1), seeds=seeds, positions=positions)
        found, is_whole = self.read(cutoff, 0), not sample.get("base_axis", "")
        ops, gather = [cutoff], self.producers.get(found)
        if not is_whole and gather is not None and kind_of(gather).gathers_all:
            found, is_whole = self.read(gather, 0), True
            ops.append(gather)
        limits: Limits = "all"
        if found not in logits:
            top = self.producers.get(found)
            if top is None or top.kind != "top" or self.read(top, 0) not in logits:
                raise _unfit(cutoff)
            limits = "candidates"
            ops.append(top)
        if not is_whole:
            raise _unfit(cutoff)
        self.take(*ops)
        return FusedSample(
            sampling=self.read(cutoff, 1), seeds=seeds, positions=positions, limits=limits
        )

    def fuse_attention(self, op: Op) -> Fused:
        """Attention with the rotations, norms and appends in front of it."""
        bias = self.read(op, 4) if op.kind == "biased_attention" else ""
        if len(op.reads) > 4 and (not bias or self.tensors[bias].role != "weight"):
            raise _unfit(op)
        appends = [self.append_to(op, self.read(op, position)) for position in (1, 2)]
        q, q_last, q_table = self.rotated(op, self.read(op, 0))
        k, k_last, k_table = self.rotated(appends[0], self.read(appends[0], 0))
        if q_table != k_table:
            raise _unfit(appends[0])
        head_dim = self.tensors[self.read(op, 1)].shape[-1]
        norms = [self.head_norm(*each, head_dim) for each in ((q, q_last), (k, k_last))]
        q_norm = k_norm = None
        if q_table and all(norms):  # of queries and keys, or of neither
            (q, q_norm), (k, k_norm) = map(self.taken_norm, filter(None, norms))
        self.take(op, *appends)
        v = self.read(appends[1], 0)
        self.attended += [q, k, v]
        scale, window = op.attr("scale"), op.attr("window")
        softcap = op.get("softcap", 0.0)
        assert isinstance(scale, float)
        assert isinstance(softcap, float)
        assert isinstance(window, int)
        return FusedAttention(
            name=op.name,
            q=q,
            k=k,
            v=v,
            q_norm=q_norm,
            k_norm=k_norm,
            positions=self.read(op, 3),
            table=q_table,
            k_cache=self.read(op, 1),
            v_cache=self.read(op, 2),
            scale=scale,
            window=window,
            softcap=softcap,
            bias=bias,
            out=_out(op),
        )

    def normed(self, name: str, length: int) -> tuple[str, InputNorm | None]:
        """What `name` is the norm of, if it is one of `length` elements each that linears and
        pointwise ops read, and that linears can do.
        """
        op = self.producers.get(name) if self.joining.norms else None
        wanted = op is not None and kind_of(op).scales_elements and _reduced(op) == length
        if op is None or not wanted or len(op.reads) == 2:
            return name, None
        users = self.users.get(name, [])
        others = [
            user
            for user in users
            if user.kind not in ("linear", "gather_rows") or self.read(user, 0) != name
        ]
        if any(not kind_of(user).is_elementwise for user in others):
            return name, None
        x, norm = self.read(op, 0), _norm(op)
        is_shared = bool(others) or name in self.outputs
        if not self.takes_norm(norm, length, is_shared):
            return name, None
        if is_shared and op.name not in self.taken:
            self.shared_norms[x, norm] = name
        self.take(op)
        return x, norm

    def rotated(self, user: Op, name: str) -> tuple[str, Op, str]:
        """What `name`, which attention or an append takes, is the rotation of; the op that takes
        that; the table of angles.
        """
        rope = self.producers.get(name)
        if rope is None or not kind_of(rope).rotates:
            return name, user, ""
        positions = 1 if kind_of(user).appends else 3
        if self.read(rope, 2) != self.read(user, positions):
            raise _unfit(user)
        self.take(rope)
        return self.read(rope, 0), rope, self.read(rope, 3)

    def head_norm(self, name: str, user: Op, head_dim: int) -> Op | None:
        """The rms norm of each head that `name` is, if `user` alone takes it."""
        norm = self.producers.get(name)
        if norm is None or kind_of(norm).statistics != "rms" or _reduced(norm) != head_dim:
            return None
        return norm if self.only_user(name) is user else None

    def taken_norm(self, norm: Op) -> tuple[str, InputNorm]:
        """What a norm that attention does is of, and how."""
        self.take(norm)
        return self.read(norm, 0), _norm(norm)

    def append_to(self, attention: Op, cache: str) -> Op:
        """The op that appends to a cache at the positions of `attention`."""
        op = self.producers.get(cache)
        if op is None or not kind_of(op).appends or self.read(op, 1) != self.read(attention, 3):
            raise _unfit(attention)
        if self.position[op.name] > self.position[attention.name]:
            raise _unfit(op)
        if len(op.reads) > 2:  # says of each row whose cache it is
            raise _unfit(op)
        return op

    def summed(self, op: Op) -> tuple[str, int, tuple[Op, ...]]:
        """The result of an op summed over ranks, their number, and the ops that make it."""
        user = self.only_user(_out(op))
        if user is None or not kind_of(user).sums_all or user.get("combine", "") != "sum":
            return _out(op), 1, (op,)
        return _out(user), _num_ranks(user), (op, user)

    def only_user(self, name: str) -> Op | None:
        """The op that reads `name`, if there is one alone and it is no output."""
        users = self.users.get(name, [])
        return users[0] if len(users) == 1 and name not in self.outputs else None

    def read(self, op: Op, position: int) -> str:
        """The tensor that an op reads, or the one that it shows all of."""
        return self.whole(op.reads[position].tensor)

    def whole(self, name: str) -> str:
        """The tensor that a view shows all of; the name itself if it is none."""
        found = self.shown.get(name)
        return found.tensor if found and found.num == self.size(found.tensor) else name

    def storage(self, name: str) -> str:
        """The tensor that a view shows some of; the name itself if it is none."""
        return self.shown[name].tensor if name in self.shown else name

    def size(self, name: str) -> int:
        return self.tensors[name].num_elements

    def take(self, *ops: Op) -> None:
        self.taken.update(op.name for op in ops)


CHOICES = ("argmax", "sample")
"""Kinds that choose a token."""


def _out(op: Op) -> str:
    return op.writes[0].tensor


def _attends_to_caches(op: Op) -> bool:
    """Whether it mixes cached values, those that the position of each row sees."""
    return kind_of(op).mixes_values and kind_of(op).reads_positions


def _multiplies_groups(op: Op) -> bool:
    """Whether rows are multiplied by the matrix of their group."""
    return kind_of(op).contracts and grouped_index(op) is not None


def _is_by_rows(linear: Op) -> bool:
    """Whether each result is the product of a row of x and one of the weights, as both lie."""
    x, w = ([dim.axes for dim in access.dims] for access in linear.reads[:2])
    out = [dim.axes for dim in linear.writes[0].dims]
    num = sum(axis.role == "reduce" for axis in linear.axes)
    return x[-num:] == w[-num:] and out == x[:-num] + w[:-num]


def _num_ranks(collective: Op) -> int:
    found = collective.attr("num_ranks")
    assert isinstance(found, int)
    return found


def _norm(op: Op) -> InputNorm:
    eps = op.attr("eps")
    assert isinstance(eps, float)
    weight, bias = ([read.tensor for read in op.reads[2:]] + ["", ""])[:2]
    return InputNorm(weight=weight, eps=eps, kind=op.kind, bias=bias)


def _reduced(op: Op) -> int:
    """Elements that each result is made of."""
    return math.prod(axis.extent for axis in op.axes if axis.role == "reduce")


def _unfit(op: Op) -> UnsupportedError:
    why = ": its keys and values are of this step, in no cache" if op.kind == "attend" else ""
    return UnsupportedError(
        f"op {op.name!r} of kind {op.kind} does not fuse{why}",
        expected="contractions with norms before and pointwise ops behind them, norms, softmax and "
        "pointwise ops of rows, attention with a cache, embeddings, gathers of columns over ranks, "
        "the choice of a token",
        remedy="run the segment by library ops",
    )
