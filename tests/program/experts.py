"""Programs with experts, for tests of all layers."""

from distmega.program.builder import ProgramBuilder
from distmega.program.ops import experts
from distmega.program.ops.parts import Built
from distmega.program.types import Program, Tensor


def moe_block(
    rows: int = 4, hidden: int = 8, num_experts: int = 6, num: int = 2, ffn: int = 12
) -> Program:
    """x + experts(x), and what the router chose: x [rows, hidden], `num` of the experts a row."""
    p = ProgramBuilder("moe")
    x = p.input("x", (rows, hidden))
    scores = p.linear(x, p.weight("router", (num_experts, hidden)), name="scores")
    weights, ids = p.top_k(scores, num, "softmax", name="chosen")
    routing = p.route(ids, num_experts, name="routing")
    gathered = p.gather_rows(x, routing, name="gathered")
    gate = p.grouped_linear(
        gathered, p.weight("w_gate", (num_experts, ffn, hidden)), routing, name="gate"
    )
    up = p.grouped_linear(
        gathered, p.weight("w_up", (num_experts, ffn, hidden)), routing, name="up"
    )
    mixed = p.grouped_pointwise("silu(a0) * a1", gate, up, routing=routing, name="mixed")
    down = p.grouped_linear(
        mixed, p.weight("w_down", (num_experts, hidden, ffn)), routing, name="down"
    )
    added = p.scatter_add(down, weights, routing, name="added")
    return p.build(p.pointwise("a0 + a1", x, added, name="y"), ids)


def t(name: str, *shape: int, dtype: str = "f32") -> Tensor:
    return Tensor(name=name, shape=shape, dtype=dtype, role="input")


def i(name: str, *shape: int) -> Tensor:
    return t(name, *shape, dtype="i32")


OFFSETS, ORDER, SLOTS = i("o", 5), i("order", 6), i("slots", 3, 2)

STATEMENTS: list[tuple[Built, str]] = [
    (
        experts.top_k("y", t("x", 3, 4), 2),
        "top_k[m:3 e:4:reduce c:2:scatter] x(m, e) -> y.weights(m, c) y(m, c) | weights='softmax'",
    ),
    (
        experts.route("y", i("ids", 3, 2), 4),
        "route[m:3:reduce c:2:reduce g:4:scatter o:5:scatter p:6:scatter i:3:scatter j:2:scatter]"
        " ids(m, c) -> y.counts(g) y.offsets(o) y.order(p) y.slots(i, j)",
    ),
    (
        experts.gather_rows("y", t("x", 3, 8), ORDER, OFFSETS, (3, 2)),
        "gather_rows[e:4 r:3 k0:8 m:3:reduce:sum:lookup p:6:reduce o:5:reduce]"
        " x(m, k0) order(p) o(o) -> y(e.r@2, k0)",
    ),
    (
        experts.grouped_linear("y", t("x", 6, 8), t("w", 4, 5, 8), OFFSETS, 3),
        "grouped_linear[e:4 r:3 n:5 k:8:reduce:sum o:5:reduce]"
        " x(e.r@2, k) w(e, n, k) o(o) -> y(e.r@2, n)",
    ),
    (
        experts.grouped_pointwise("y", "silu(a0) * a1", [t("a", 6, 8), t("b", 6, 8)], OFFSETS, 3),
        "pointwise[e:4 r:3 i0:8 o:5:reduce] a(e.r@2, i0) b(e.r@2, i0) o(o) -> y(e.r@2, i0)"
        " | expr='(silu(a0) * a1)'",
    ),
    (
        experts.scatter_add("y", t("x", 6, 8), t("w", 3, 2), SLOTS, OFFSETS),
        "scatter_add[m:3 n:8 c:2:reduce e:4:reduce:sum r:3:reduce o:5:reduce]"
        " x(e.r@3, n) w(m, c) slots(m, c) o(o) -> y(m, n)",
    ),
]
