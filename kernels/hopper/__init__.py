"""Persistent kernels for Hopper GPUs: one for programs of one row, one for several, up to 64.

Fused ops (tasks/fuse/) and the layouts of arenas come in; a runner goes out that launches a whole
segment, or several steps, as one kernel. row_plan/ and batch_plan/ make the queues and prove
them, from what plan/ has for both; one_row/ and batch/ are the kernels with their runners, bodies/
in each computes an instruction; ptx/ is what both are built of, emulator/ runs the queues on a CPU.
Here are the choice between the two, the all-reduce and what reports hangs and timelines. Start at
queues.py, then one_row/runner.py.
"""
