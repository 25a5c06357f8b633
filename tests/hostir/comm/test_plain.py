"""What ranks tell each other: plain values there and back, and nothing else."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmega.hostir.comm.plain import decode_plain, encode_plain
from tests.repo.source import ROOT, imports, python_files

KEPT_PLANS = Path("distmega/engine/kept_plans.py")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.binary(),
    lambda inner: st.lists(inner)
    | st.lists(inner).map(tuple)
    | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)


@given(VALUES)
def test_a_value_comes_back_as_it_was(value):
    found = decode_plain(encode_plain(value))
    assert found == value
    assert repr(found) == repr(value)  # which tells 1 from 1.0 and True


@given(st.binary() | st.text().map(str.encode) | VALUES.map(pickle.dumps))
def test_any_bytes_are_a_value_or_a_value_error(data: bytes):
    try:
        found = decode_plain(data)
    except ValueError:
        return
    assert decode_plain(encode_plain(found)) == found or found != found


@pytest.mark.parametrize(
    "text",
    [
        '{"bytes":"a"}',
        '{"bytes":"YQ==","more":1}',
        '{"set":[]}',
        '{"dict":[["a"]]}',
        '{"dict":[[1,2]]}',
        '{"dict":{"a":1}}',
        '{"tuple":1}',
        "{}",
        "[" * 100_000,
        "1" * 5000,
    ],
)
def test_other_forms_are_refused(text: str):
    with pytest.raises(ValueError):  # noqa: PT011  whatever is wrong first
        decode_plain(text.encode())


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {1}}, [b"a", bytearray(b"b")]])
def test_what_is_not_plain_is_not_told(value):
    with pytest.raises(TypeError, match="can't be told to other ranks"):
        encode_plain(value)


def test_pickle_stays_where_both_ends_are_processes_of_one_launcher():
    """Ranks exchange no pickled objects; torch.distributed has some calls that would. An engine's
    plans on disk are pickled: it reads its user's own files alone (test_kept_plans.py).
    """
    pickling = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
    wrong = []
    for path in python_files():
        inside = path.relative_to(ROOT)
        if inside.parts[0] in ("tests", "launch") or inside == KEPT_PLANS:
            continue
        names = {found.target.partition(".")[0] for found in imports(path)}
        wrong += [f"{path} imports {name}" for name in names & pickling]
        wrong += [
            f"{path} calls {call}"
            for call in ("dist.all_gather_object", "_object_list(", "dist.gather_object")
            if call in path.read_text()
        ]
    assert not wrong
