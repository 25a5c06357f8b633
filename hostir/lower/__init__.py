"""From one rank's tensor program to a host program.

A localised plan comes in; library ops, megakernel launches, collectives and loops go out as nodes
of hostir/ir. Start at lower.py: segments.py forms what a megakernel does, loops.py and chunks.py
host loops, host_streams.py orders their streams. join_products.py changes the program before, by
the names of joined_weights.py; pipeline.py links the host programs of several stages.
"""
