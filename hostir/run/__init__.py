"""Runs host programs: the evaluator, streams and events, CUDA graphs, timelines.

A host program, tensors and a Communicator come in; results go out. Start at evaluator.py.
"""
