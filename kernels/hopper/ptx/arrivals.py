"""Words that say what peers have pushed: the number of the launch, behind data that go as they are.

A program stores its part into peers' memory, tells them, and waits until they have told it. The
word is released at scope sys behind the stores of all threads, and acquired before what it tells of
is read. Waits have no end: who calls sees to a deadline. Next on the walk: ../sum_norm.py.
"""

# Kernels' arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from distmega.kernels.gluon_compat import cta_barrier


@gluon.jit
def tell_ranks(words, at, flag, team_rank, ranks: gl.constexpr):
    """Sets word `at` of every peer to `flag`, behind what this program has stored. words: int32, of
    all ranks.
    """
    cta_barrier()  # all threads' stores come before the one that releases
    for rank in gl.static_range(ranks):
        if team_rank != rank:
            gl.atomic_xchg(words[rank] + at, flag, sem="release", scope="sys")


@gluon.jit
def await_ranks(arrived, first, stride, flag, team_rank, ranks: gl.constexpr):
    """Returns when the words of all peers, of `arrived` `stride` apart, have reached `flag`."""
    for rank in gl.static_range(ranks):
        if team_rank != rank:
            word = arrived + first + rank * stride
            found = gl.atomic_add(word, 0, sem="acquire", scope="sys")
            while found != flag:
                found = gl.atomic_add(word, 0, sem="acquire", scope="sys")
