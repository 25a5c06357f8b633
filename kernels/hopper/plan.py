"""What a decode kernel is asked to do: its shape, where its matrices lie, the queue of every SM.

Made by queues.py, read by runner.py, which is next on the walk.
"""

from dataclasses import dataclass

from distmega.errors import VerifyError
from distmega.kernels.fusion import Draw
from distmega.kernels.hopper.words import Instruction
from distmega.kernels.tasks.graph import Mode

HEAD_DIMS = (64, 128)
MAX_QUERIES = 8
"""Query heads of one attention task."""
MAX_MATRICES = 3
ITEM_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """All weights of one row length: num_rows rows of `columns` elements from byte `offset` on."""

    columns: int
    offset: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Tagged words `first` to first + num_words of the exchange, in the order of dataflow."""

    name: str
    first: int
    num_words: int

    @property
    def words(self) -> range:
        return range(self.first, self.first + self.num_words)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """Extents of one of num_ranks ranks that the kernel is specialised for or asks for."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    qk_norm: bool
    eps: float
    scale: float
    max_tiles_k: int
    num_ranks: int

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parts(self) -> int:
        """Attention tasks that share a kv head's queries."""
        return -(-self.group // MAX_QUERIES)

    @property
    def num_queries(self) -> int:
        """Query heads of each; the last task begins early enough to have as many as the others."""
        return -(-self.group // self.num_parts)

    def first_query(self, head: int, part: int) -> int:
        """First query head of part number `part` of a kv head."""
        return head * self.group + min(part * self.num_queries, self.group - self.num_queries)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeQueues:
    """Instructions of every SM. mode: with barriers where "op". draw: where tokens are not the
    likeliest. head_rows: of the logits, what one SM draws from, at most. best, sample, num_words:
    first tagged word of the heads' maxima and of what draws exchange, count of all words; buffers:
    all that lies there. Names: tensors that the runner binds. A stage of a pipeline that is not the
    first has no `embed` and no `tokens` (""), but x as `entry`; one that is not the last has no
    head, but x as `exit`, from tagged word `exit_word` on.
    """

    shape: DecodeShape
    mode: Mode
    matrices: tuple[Matrix, ...]
    queues: tuple[tuple[Instruction, ...], ...]
    draw: Draw | None
    head_rows: int
    best: int
    sample: int
    num_words: int
    buffers: tuple[Buffer, ...]
    first_id: int
    embed: str
    rope_table: str
    tokens: str
    positions: str
    token: str
    logits: str
    entry: str = ""
    exit: str = ""
    exit_word: int = 0


def unfit(found: str) -> VerifyError:
    """The error for a segment that the kernel can't do."""
    return VerifyError(
        f"the decode kernel can't do {found}",
        expected=f"one token, rows of a multiple of 64 elements, heads of {HEAD_DIMS}",
        remedy="run the segment by library ops",
    )
