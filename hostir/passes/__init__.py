"""Passes over host programs: plain functions from program to program, in one list.

passes.py has the list and the runner that verifies after each; the other files are passes, or
what passes ask. Start at passes.py.
"""
