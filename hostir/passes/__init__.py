"""Passes over host programs: plain functions from program to program.

passes.py has the list of those that every program goes through, and the runner that verifies after
each: start there. sink_waits.py, coalesce.py, kernel_order.py, event_waits.py, deallocations.py and
borrow.py are that list, a pass each. fuse.py and then the passes of JOINS (../lower/lower.py), a
file each by joining.py, make library ops into fewer before that, and split_sums.py cuts what is
left of products for the ops behind them; fused_kinds.py has what they make. resize.py gives a
finished program other extents.
"""
