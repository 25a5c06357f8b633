"""The `distmega` command: flags in, lines and exit codes out. Start at main.py.

doctor.py and calibration.py say what a machine has, explain/ what would run on it; files that
end in _ranks hold what a command has every rank do. No other package prints.
"""
