"""Each rule of the verifier, broken by one change to the text of a sound program."""

from dataclasses import replace

import pytest

from distmega.errors import VerifyError
from distmega.hostir.ir.nodes import ForLoop, Node, SliceView
from distmega.hostir.ir.text import parse_host, print_host
from distmega.hostir.ir.verify import verify_host
from distmega.hostir.lower.lower import lower_program
from distmega.hostir.passes.passes import run_passes
from tests.hostir.programs import RING, STREAMED, attention_block, chain, local, mlp, with_views

KERNEL = print_host(run_passes(lower_program(local(mlp()), megakernel=True, peer_memory=True)))

CHAIN = print_host(run_passes(lower_program(local(chain()), megakernel=False, peer_memory=False)))

ATTENTION = print_host(
    run_passes(lower_program(local(attention_block(2)), megakernel=False, peer_memory=False))
)
"""Ops that read attributes."""

COALESCED = """
host exchange on mesh(tp=2)
  streams 1, events 0
  input x: f32[4]
  temp y: f32[4]
  temp z: f32[4]
  body
    allocate y
    coalesce
    send x to tp[+1]
    recv y from tp[-1]
    end coalesce as swap
    wait swap
  return y
"""

GATHERED = """
host gathered on mesh(tp=2)
  streams 1, events 0
  input x: f32[4, 4]
  temp y: f32[8, 4]
  body
    allocate y
    all_gather tp (x) -> (y) as whole | dim=0
    wait whole
  return y
"""

VIEWED = print_host(
    run_passes(lower_program(local(with_views()), megakernel=False, peer_memory=False))
)

FUSED = """
host fused on mesh(tp=1)
  streams 1, events 0
  input x: f32[4, 8]
  weight w: f32[8]
  temp y: f32[4, 8]
  temp z: f32[4, 8]
  body
    allocate y
    y = fused_pointwise[i:4 j:8] x(i, j) w(j) -> y(i, j) | dtypes=('f32',) exprs=('a0 * a1',)
    allocate z
    z = fused_rows[i:4 j:8] y(i, j) w(j) -> z(i, j) | dtypes=('f32',) outs=(3,) """ + (
    """steps=('a0 + 1.0', 'norm rms_norm 2 1 -1 1e-05')
    free y
  return z
"""
)

SHOWN = """
host shown on mesh(tp=1)
  streams 1, events 0
  input x: f32[4]
  weight w: f32[4]
  state s: f32[4]
  temp v: f32[4]
  body
    v = view[i:4] s(i) -> v(i)
    v = set[i:4] x(i) -> v(i)
    v = view[j:4] s(j) -> v(j)
  return s
"""

MUTATIONS = [
    (FUSED, "fitting_operands", "a0 * a1", "a0 * a2", "has exprs of 2 operands"),
    (FUSED, "fitting_operands", "a0 * a1", "a0 * it", "with exprs="),
    (FUSED, "fitting_operands", "exprs=", "expr=", "no exprs"),
    (FUSED, "fitting_operands", "exprs=(", "exprs=('a0', ", "has 2 exprs of 1 result"),
    (FUSED, "fitting_operands", "dtypes=('f32',) e", "dtypes=('f33',) e", "with dtypes="),
    (FUSED, "fitting_operands", "dtypes=('f32',) e", "dtypes=('i32',) e", "has dtypes="),
    (FUSED, "fitting_operands", "outs=(3,)", "outs=(4,)", "has outs="),
    (FUSED, "fitting_operands", "a0 + 1.0", "a2 + 1.0", "has step"),
    (FUSED, "fitting_operands", "norm rms_norm 2", "norm rms_norm 3", "has step"),
    (FUSED, "fitting_operands", "rms_norm", "any_norm", "with steps="),
    # program, rule, what is replaced, by what, node named
    (STREAMED, "known_names", "free p_i", "free q_i", "free q_i"),
    (STREAMED, "known_names", "return y", "return z", "'z' is no buffer"),
    (STREAMED, "known_names", "all_reduce tp", "all_reduce dp", "mesh axis 'dp'"),
    (STREAMED, "known_names", "temp x_i:", "temp y:", "share a name"),
    (KERNEL, "known_names", "launch mlp.0(", "launch mlp.9(", "kernel 'mlp.9'"),
    (STREAMED, "known_names", "stream 0\n", "v = view[m:6] y(m, m) ->\n", "a view of 1 as 0"),
    (VIEWED, "known_names", "] a(i0, i1) -> flat", "] half(i0, i1) -> flat", "nothing yet"),
    (VIEWED, "known_names", "] a(i0, i1) -> flat", "] flat(i0, i1) -> flat", "nothing yet"),
    (VIEWED, "known_names", "temp half:", "state half:", "state 'half' shows 'flat'"),
    (SHOWN, "known_names", "s(j) -> v(j)", "w(j) -> v(j)", "temp 'v' shows 'w'"),
    (STREAMED, "known_names", "temp p_i: f32", "temp p_i: i128", "[2, 4] and dtype i128"),
    (STREAMED, "known_names", "p_i: f32[2, 4]", "p_i: f32[2, 0]", "'p_i' of shape [2, 0]"),
    (STREAMED, "known_names", "p_i(m, n)", "p_i(m, n) | base_axis='dp'", "mesh axis 'dp'"),
    (STREAMED, "fitting_operands", "x_i(m, k)", "x_i(m, q)", "'x_i' indexed by q"),
    (STREAMED, "fitting_operands", "n:4", "n:3", "'p_i' reads a part of 'w' of [4, 4]"),
    (CHAIN, "fitting_operands", "temp a: f64[8, 8]", "temp a: f64[8, 9]", "part of 'a' of [8, 9]"),
    (STREAMED, "fitting_operands", "w(n, k)", "w(n, n)", "'w' by one axis twice"),
    (CHAIN, "fitting_operands", "(a0 * 2.0)", "(a0 * a1)", "of 1 operand"),
    (STREAMED, "fitting_operands", "x_i(m, k)", "x_i(m, k-1)", "indexed beyond its ends"),
    (KERNEL, "fitting_operands", "launch mlp.0(x, ", "launch mlp.0(", "node 1"),
    (KERNEL, "fitting_operands", "w1, w2", "w1=w2, w2", "'w1'"),
    (RING, "fitting_operands", "pp[+1] as out", "pp[3] as out", "peer 3 of 3"),
    (ATTENTION, "fitting_operands", "eps=1e-05", "eps='few'", "with eps='few'"),
    (ATTENTION, "fitting_operands", "eps=1e-05", "eps=-1e-05", "with eps=-1e-05"),
    (ATTENTION, "fitting_operands", "scale=0.5 ", "", "with no scale"),
    (ATTENTION, "fitting_operands", "window=0", "window=1.5", "with window=1.5"),
    (STREAMED, "fitting_operands", "x_i(m, k) w(n, k)", "x_i(m, k)", "is linear of 1 operand"),
    (STREAMED, "fitting_operands", "k:4:reduce:sum", "k:4:reduce:max", "combines 'k' by max"),
    (STREAMED, "fitting_operands", "n:4 k", "n:0 k", "extent=0"),
    (STREAMED, "fitting_operands", "= linear[", "= lineal[", "kind 'lineal'"),
    (CHAIN, "fitting_operands", "= pointwise[", "= all_reduce[", "which no library does"),
    (CHAIN, "fitting_operands", "temp a: f64", "temp a: f32", "a result 'a' of f32"),
    (ATTENTION, "fitting_operands", "= rms_norm[", "= rope[", "with eps=1e-05"),
    (VIEWED, "fitting_views", "-> flat(i0.i1)", "-> flat(i1.i0)", "dims of 'a' that have gaps"),
    (STREAMED, "fitting_collectives", "'sum'", "'mean'", "combine='mean'"),
    (STREAMED, "fitting_collectives", "combine='sum'", "combine='argmax'", "1 ins, 1 outs"),
    (STREAMED, "fitting_collectives", "all_reduce tp", "all_gather tp", "combine='sum'"),
    (GATHERED, "fitting_collectives", " | dim=0", "", "dim=''"),
    (GATHERED, "fitting_collectives", "dim=0", "dim=2", "dim=2"),
    (GATHERED, "fitting_collectives", "all_gather", "broadcast", "source=''"),
    (STREAMED, "fitting_collectives", "(p_i) -> (y_i)", "(p_i) -> (y)", "node 9"),
    (STREAMED, "fitting_collectives", "(p_i) -> (y_i)", "(p_i, w) -> (y_i)", "2 ins, 1 outs"),
    (STREAMED, "fitting_collectives", "temp p_i: f32", "temp p_i: bf16", "bf16[2, 4]"),
    (STREAMED, "written_roles", "-> (y_i)", "-> (x_i)", "'x_i' is written"),
    (STREAMED, "written_roles", "allocate p_i", "allocate x_i", "allocate x_i"),
    (STREAMED, "written_roles", "allocate y\n", "allocate w\n", "allocate w"),
    (STREAMED, "buffer_lifetimes", "      allocate p_i\n", "", "'p_i' has no storage here"),
    (STREAMED, "buffer_lifetimes", "allocate y\n", "allocate y\n    allocate y\n", "already"),
    (STREAMED, "buffer_lifetimes", "free p_i", "free y", "'y' is allocated outside of this body"),
    (STREAMED, "buffer_lifetimes", "free p_i\n", "free p_i\n      free p_i\n", "not here"),
    (STREAMED, "buffer_lifetimes", "  return y", "    free y\n  return y", "output 'y' is freed"),
    (
        STREAMED,
        "buffer_lifetimes",
        "      allocate p_i",
        "      allocate p_i\n      free p_i",
        "p_i",
    ),
    (STREAMED, "no_leak", "      free p_i\n", "", "'p_i' is never freed"),
    (COALESCED, "no_leak", "return y", "return x", "'y' is never freed"),
    (STREAMED, "waited_communication", "      wait sum\n", "", "'sum' is never waited for"),
    (STREAMED, "waited_communication", "wait sum", "wait other", "called 'other'"),
    (STREAMED, "waited_communication", "wait sum\n", "wait sum\n      wait sum\n", "called 'sum'"),
    (RING, "waited_communication", "as in", "as out", "pending already"),
    (STREAMED, "bounded_rings", "stream 1 + i % 2", "stream 1 + i % 3", "stream 3 of 3"),
    (STREAMED, "bounded_rings", "events 3", "events 2", "event 2 of 2"),
    (STREAMED, "bounded_rings", "    record event 0\n", "", "not recorded before"),
    (STREAMED, "bounded_rings", "record event 1 + i % 2", "record event 1", "wait event 2"),
    (COALESCED, "closed_groups", "    end coalesce as swap\n    wait swap\n", "", "never closed"),
    (COALESCED, "closed_groups", "    coalesce\n", "", "outside of groups"),
    (COALESCED, "closed_groups", "send x to tp[+1]", "send x to tp[+1] as out", "none inside"),
    (
        COALESCED,
        "closed_groups",
        "    coalesce\n",
        "    coalesce\n    coalesce\n",
        "inside a group",
    ),
    (COALESCED, "closed_groups", "    recv", "    stream 0\n    recv", "not a transfer"),
    (STREAMED, "loop_indices", "x dim 0 by i", "x dim 0 by j", "index 'j'"),
    (STREAMED, "loop_indices", "for i in 3", "for i in 0", "extent 0"),
    (STREAMED, "loop_indices", "for i in 3", "for i in 2", "2 chunks f32[2, 4]"),
    (STREAMED, "loop_indices", "    stream 0\n", "    stream 0 + i % 2\n", "index 'i'"),
    (COALESCED, "written_outputs", "return y", "return x, z", "'z' is never written"),
]


@pytest.mark.parametrize(
    "text", [STREAMED, RING, KERNEL, ATTENTION, COALESCED, GATHERED, VIEWED, SHOWN]
)
def test_sound_programs_pass(text: str):
    host = parse_host(text)
    assert verify_host(host, finalized=host.buffers) is host


@pytest.mark.parametrize(("text", "rule", "old", "new", "named"), MUTATIONS)
def test_a_broken_rule_is_named(text: str, rule: str, old: str, new: str, named: str):
    assert old in text
    with pytest.raises(VerifyError) as caught:
        verify_host(parse_host(text.replace(old, new, 1)))
    assert f"[rule {rule}]" in str(caught.value)
    assert named in str(caught.value)


def test_final_allocations_may_not_change():
    host = parse_host(STREAMED)
    smaller = tuple(replace(b, dtype="f64") if b.name == "w" else b for b in host.buffers)
    with pytest.raises(VerifyError, match=r"buffer 'w' became .*f64.*\[rule final_allocations\]"):
        verify_host(replace(host, buffers=smaller), finalized=host.buffers)


def test_leaks_are_allowed_before_deallocations_are_inserted():
    host = parse_host(STREAMED.replace("      free p_i\n", ""))
    assert verify_host(host, freed=False) is host


@pytest.mark.parametrize("field", ["dim", "shift", "step"])
def test_a_slice_counts_from_zero(field: str):
    text = STREAMED.replace("slice x_i of x dim 0 by i", "slice x_i of x dim 0 by i step 2")
    host = parse_host(text)

    def changed(node: Node) -> Node:
        if isinstance(node, ForLoop):
            return replace(node, body=tuple(map(changed, node.body)))
        return replace(node, **{field: -1}) if isinstance(node, SliceView) and node.step else node

    verify_host(host)
    with pytest.raises(VerifyError, match="rule loop_indices"):
        verify_host(replace(host, body=tuple(map(changed, host.body))))
