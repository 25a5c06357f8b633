"""From one rank's tensor program to a host program.

A localised plan comes in; library ops, megakernel launches, collectives and loops go out as nodes
of hostir/ir. Start at lower.py; pipeline.py links the programs of several stages.
"""
