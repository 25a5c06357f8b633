"""Clocks of an order graph say what searching it says."""

from hypothesis import given
from hypothesis import strategies as st

from distmega.hostir.check.order_graph import Before, OrderGraph


@st.composite
def graphs(draw: st.DrawFn) -> OrderGraph:
    """Vertices that follow a few earlier ones, most of them the latest of a handful of streams."""
    graph = OrderGraph()
    streams: list[list[int]] = [[] for _ in range(draw(st.integers(1, 12)))]
    for _ in range(draw(st.integers(1, 60))):
        stream = draw(st.sampled_from(streams))
        follows = stream[-1:] if draw(st.integers(0, 4)) else []
        others = draw(st.lists(st.integers(0, 59), max_size=2))
        follows += [each for each in others if each < len(graph.labels)]
        stream.append(graph.add("", follows, []))
    return graph


@given(graphs())
def test_clocks_are_reachability(graph: OrderGraph):
    ancestors: list[set[int]] = []
    for follows in graph.follows:
        ancestors.append(set(follows).union(*(ancestors[each] for each in follows)))
    before = Before(graph, range(len(graph.labels)))
    for other, expected in enumerate(ancestors):
        found = {one for one in range(len(ancestors)) if before(one, other)}
        assert found == expected


def test_clocks_stay_as_short_as_work_runs_side_by_side():
    """Two streams that meet now and then need two chains, however long they are."""
    graph = OrderGraph()
    ends = [graph.add("", [], []), graph.add("", [], [])]
    for step in range(1000):
        ends = [graph.add("", ends if step % 7 == 0 else [end], []) for end in ends]
    before = Before(graph, range(len(graph.labels)))
    assert set(before.chains) == {0, 1}
    assert before(0, len(graph.labels) - 1)
