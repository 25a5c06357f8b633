"""The plan: which rank computes which part of each op, what it holds, which collectives join them.

A Program, a DeviceMesh and a Machine come in; a Plan goes out, and by localize.py the program of
one rank. Start at planner.py; docs/sharding.md has the idea.

layout/ has meshes and how tensors lie on them, search/ prices and chooses, resolve/ makes layouts
and the collectives between them, streams/ chunks in host loops, overlap/ matmuls beside their
collectives.
"""
