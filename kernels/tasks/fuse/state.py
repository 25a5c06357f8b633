"""What is known of a segment that is fused: who makes and takes each tensor, which ops are taken.

In: a segment, and what contractions may take in. Filled by segment.py and the files of its rules.
Next on the walk: rows.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

from distmega.errors import UnsupportedError
from distmega.kernels.tasks.fuse.types import InputNorm
from distmega.kernels.tasks.fuse.views import columns_by_views, shown_by_views
from distmega.program.kinds import kind_of
from distmega.program.ops.norms import eps_of
from distmega.program.types import Op, Program, Tensor

TakesNorm = Callable[[InputNorm, Tensor | None, int, bool], bool]
"""Whether contractions can do a norm, by its weight, if it has one, of so many elements; the last
says whether others than contractions take its result, too.
"""


def takes_every_norm(norm: InputNorm, weight: Tensor | None, length: int, is_shared: bool) -> bool:
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


class Fusion:
    """What one pass over a segment knows. `taken`: ops that a fused op already contains."""

    def __init__(self, segment: Program, takes_norm: TakesNorm, joining: Joining) -> None:
        self.segment = segment
        self.takes_norm, self.joining = takes_norm, joining
        self.tensors = segment.tensor_map()
        self.shown = shown_by_views(segment)
        self.columns = columns_by_views(segment)
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
        self.parts: dict[str, tuple[str, ...]] = {}
        """Of tensors of rows that attention alone takes, as queries, keys and values: these."""
        self.shared_norms: dict[tuple[str, InputNorm], str] = {}
        """Results of norms that others than contractions take, by what they are norms of."""

    def normed(self, name: str, length: int) -> tuple[str, InputNorm | None]:
        """What `name` is the norm of, if it is one of `length` elements each that linears and
        pointwise ops read, and that linears can do.
        """
        op = self.producers.get(name) if self.joining.norms else None
        wanted = op is not None and kind_of(op).scales_elements and op.num_reduced == length
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
        x, norm = self.read(op, 0), norm_of(op)
        is_shared = bool(others) or name in self.outputs
        if not self.takes_norm(norm, self.tensors.get(norm.weight), length, is_shared):
            return name, None
        if is_shared and op.name not in self.taken:
            self.shared_norms[x, norm] = name
        self.take(op)
        return x, norm

    def summed(self, op: Op) -> tuple[str, int, tuple[Op, ...]]:
        """The result of an op summed over ranks, their number, and the ops that make it."""
        user = self.only_user(out_of(op))
        if user is None or not kind_of(user).sums_all or user.get("combine", "") != "sum":
            return out_of(op), 1, (op,)
        return out_of(user), num_ranks_of(user), (op, user)

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


def out_of(op: Op) -> str:
    return op.writes[0].tensor


def num_ranks_of(collective: Op) -> int:
    found = collective.attr("num_ranks")
    assert isinstance(found, int)
    return found


def norm_of(op: Op) -> InputNorm:
    weight, bias = ([read.tensor for read in op.reads[2:]] + ["", ""])[:2]
    return InputNorm(weight=weight, eps=eps_of(op), kind=op.kind, bias=bias)


def does_not_fuse(op: Op) -> UnsupportedError:
    return UnsupportedError(
        f"op {op.name!r} of kind {op.kind} does not fuse",
        expected="contractions with norms before and pointwise ops behind them, norms, softmax and "
        "pointwise ops of rows, attention, embeddings, gathers of columns over ranks, "
        "the choice of an id",
        remedy="run the segment by library ops",
    )
