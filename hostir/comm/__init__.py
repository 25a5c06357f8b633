"""Communication between the ranks of a mesh: gloo on CPUs, NCCL on GPUs, signals.

A mesh and a team come in; collectives whose results are bitwise equal on all ranks go out. Start
at communicator.py.
"""
