"""Named axes over ranks: coordinates, teams, text, and bad meshes."""

import pickle

import pytest

from distmega.errors import MeshError
from distmega.sharding.layout.mesh import DeviceMesh

GIVEN = DeviceMesh.from_ranks([[3, 4, 1], [0, 8, 2]], ("dp", "tp"))


def test_case_n15_coordinates_and_teams_of_given_ranks():
    assert GIVEN.coordinate(8) == {"dp": 1, "tp": 1}
    assert GIVEN.team("tp", 4) == (3, 4, 1)
    assert GIVEN.team("dp", 2) == (1, 2)


def test_ranks_are_row_major_by_default():
    mesh = DeviceMesh(dp=2, tp=4)
    assert mesh.ranks == tuple(range(8))
    assert mesh.coordinate(6) == {"dp": 1, "tp": 2}
    assert mesh.team("tp", 6) == (4, 5, 6, 7)
    assert mesh.team("dp", 6) == (2, 6)
    assert list(mesh.coordinates())[6] == mesh.coordinate(6)


ANY = (DeviceMesh(tp=1), DeviceMesh(), DeviceMesh(a=2, b=3), DeviceMesh(self=2, sizes=3), GIVEN)


@pytest.mark.parametrize("mesh", ANY)
def test_meshes_are_values_that_print_and_parse(mesh):
    assert DeviceMesh.parse(str(mesh)) == mesh
    assert hash(DeviceMesh.parse(str(mesh))) == hash(mesh)
    assert pickle.loads(pickle.dumps(mesh)) == mesh


def test_a_mesh_can_not_be_changed():
    with pytest.raises(AttributeError):
        GIVEN.ranks = (1, 2)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: DeviceMesh.from_ranks([[0, 1], [1, 2]], ("dp", "tp")), "ranks [1]"),
        (lambda: DeviceMesh.from_ranks([[0, 1], [2]], ("dp", "tp")), "[[0, 1], [2]]"),
        (lambda: DeviceMesh.from_ranks([0, -1], ("tp",)), "ranks [-1]"),
        (lambda: DeviceMesh.from_ranks([0, 1.5], ("tp",)), "ranks 1.5"),
        (lambda: DeviceMesh.from_ranks([0, True], ("tp",)), "ranks True"),
        (lambda: DeviceMesh.from_ranks("01", ("tp",)), "ranks '01'"),
        (
            lambda: DeviceMesh.from_ranks([0, 1], ("dp", "tp")),
            "axis names ('dp', 'tp') for",
        ),
        (lambda: DeviceMesh.from_ranks([[0], [1]], ("tp", "tp")), "['tp', 'tp']"),
        (lambda: DeviceMesh(tp=0), "size 0"),
        (lambda: DeviceMesh(**{"t p": 2}), "mesh axis 't p'"),
        (lambda: DeviceMesh.from_ranks([0, 1], (5,)), "mesh axis 5"),
        (lambda: DeviceMesh(tp=True), "size True"),
        (lambda: GIVEN.coordinate(7), "rank 7"),
        (lambda: GIVEN.team("pp", 3), "'pp'"),
        (lambda: DeviceMesh.parse("mesh(tp)"), "'mesh(tp)'"),
        (lambda: DeviceMesh.parse("tp=2"), "'tp=2'"),
        (lambda: DeviceMesh(tp=10**12), "['tp'] of more than 65536 ranks"),
        (lambda: DeviceMesh(dp=10**5000), "['dp'] of more than 65536 ranks"),
        (lambda: DeviceMesh.parse("mesh(tp=999999999)"), "['tp'] of more than 65536 ranks"),
        (lambda: DeviceMesh.parse(f"mesh(tp={10**20})"), "mesh text"),
        (lambda: DeviceMesh.parse("mesh(tp=2) on 1,,2"), "mesh text"),
    ],
)
def test_bad_meshes_name_what_is_wrong(make, found):
    with pytest.raises(MeshError) as caught:
        make()
    assert found in caught.value.found


def test_a_part_is_the_ranks_at_one_coordinate():
    mesh = DeviceMesh(pp=2, tp=3)
    assert str(mesh.part("pp", 0)) == "mesh(tp=3)"
    assert mesh.part("pp", 1).ranks == (3, 4, 5)
    assert mesh.part("tp", 2).ranks == (2, 5)
    with pytest.raises(MeshError, match="coordinate 2 along mesh axis 'pp'; expected 0 to 1"):
        mesh.part("pp", 2)
