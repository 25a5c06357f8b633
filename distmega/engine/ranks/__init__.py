"""What runs on every rank when a command is launched.

A job's payload and a RankContext come in; an engine is made or a report, and events go out.
Launchers call the functions of jobs.py by name: read that first. What ranks have to decide
together is in agreement.py.
"""
