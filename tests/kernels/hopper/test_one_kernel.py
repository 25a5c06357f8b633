"""What keeps a step from being one kernel, whatever its ops are."""

from distmega.kernels.hopper.queues import why_not_one_kernel
from distmega.program.builder import ProgramBuilder


def test_a_step_of_one_segment_without_recurrent_states_may_be_a_kernel():
    p = ProgramBuilder("step")
    segment = p.build(p.input("x", (4, 4)).map("a0 + 1"))
    assert why_not_one_kernel([segment], recurrent=False) == ""
    assert why_not_one_kernel([segment] * 2, recurrent=False) == "a step is 2 segments"
    assert why_not_one_kernel([], recurrent=False) == "a step is 0 segments"
    assert "recurrent states" in why_not_one_kernel([segment], recurrent=True)
