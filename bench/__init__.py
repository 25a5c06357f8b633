"""Measurements: a command a file, each beside what it is compared with.

Names of cases and options come in; a record a case goes out, into bench/results. Start at
options.py (options, GPUs that are needed) and records.py, then cases.py (what a name says),
timing.py and ranks.py (how it is timed, on how many ranks); models.py and
llama.py state programs with the same in torch, torch_decoder.py is what other decoders are compared
with; tables.py writes the pages. All other files are commands: `python -m bench.decode`.
"""
