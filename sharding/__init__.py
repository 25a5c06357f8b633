"""The plan: which rank computes which part of each op, what it holds, which collectives join them.

A Program, a DeviceMesh and a Machine come in; a Plan goes out, and by localize.py the program of
one rank. Start at planner.py, then plan.py, what a plan states; docs/sharding.md has the idea.
layout/ says where things are, search/ chooses divisions, resolve/ makes collectives of them,
streams/ and overlap/ what runs chunk by chunk or beside each other; finalize.py fixes allocations,
memory.py adds them up, verify.py proves the plan, explain.py tells it.
"""
