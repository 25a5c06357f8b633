"""Printed host programs from outside are read or refused."""

from hypothesis import strategies as st

from distmega.hostir.ir.text import parse_host, print_host
from tests.fuzz import damaged, fuzz_target
from tests.hostir.programs import RING, STREAMED

SEGMENT = """
host launched on mesh(tp=2, dp=3) on 0,1,2,3,4,5
  streams 1, events 0
  symmetric buffer tp: 64 bytes
  input x: f32[8, 4]
  temp y: f32[8, 4]
  program inner
    input x: f32[8, 4]
    temp y: f32[8, 4]
    y = pointwise[i0:8 i1:4] x(i0, i1) -> y(i0, i1) | expr='silu(a0)'
    return y
  body
    allocate y
    launch inner(x, y)
    all_reduce tp (y) -> (y) as y.done | combine='sum'
    all_gather_matmul tp (x, y) -> x rows 4 borrowed
    wait y.done
  return y
"""
WORDS = (
    "for i in 4:\n", "for i in 4:\n " * 40, "body\n", "return", "program p\n", "host a on mesh(",
    "mesh(tp=99999999999)", "mesh(tp=99999)", "tp[+1]", "tp[-1]", " + i % 3", "(", ")", ") -> (",
    "9" * 5000, "stream 1", "record event ", "launch ", "slice v of x dim 0 by i", "\n", "  ",
)  # fmt: skip


def read_host(text: str) -> None:
    host = parse_host(text)
    assert parse_host(print_host(host)) == host


test_host_programs = fuzz_target(damaged((STREAMED, RING, SEGMENT), WORDS) | st.text(), read_host)


def test_the_seeds_are_read():
    for text in (STREAMED, RING, SEGMENT):
        read_host(text)
