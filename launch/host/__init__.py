"""What ranks and launchers share on one machine: its processes and GPUs, where sockets listen, the
store over which ranks find each other, and the messages between a rank and its launcher.

A process or a rank comes in; go out facts of the system and small messages. Nothing here knows of a
launcher. Start at reports.py.
"""
