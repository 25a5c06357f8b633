"""The `distmega` command: flags in, lines and exit codes out. Start at main.py.

A file a command; findings.py and calibration.py say what a machine has, explain/ what would run on
it, flags.py and starting.py have what commands share; files that end in _ranks hold what a command
has every rank do. No other package prints.
"""
