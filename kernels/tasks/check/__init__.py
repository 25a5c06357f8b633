"""Proofs of schedules by other means than they were made with.

A Schedule comes in, or queues of any tasks; a CheckError goes out where tasks can deadlock, wait in
vain or race. Start at schedule.py, which asks launch_clocks.py; queues.py judges queues with
counters alone.
"""
