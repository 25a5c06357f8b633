"""Megakernels on CPUs: the queues of a rank run on virtual SMs, in any order that events allow. An
encoded schedule and the memory of a rank come in; tensors go out.

Start at runner.py; interpreter.py runs queues, peer.py is memory that ranks of one host share.
"""
