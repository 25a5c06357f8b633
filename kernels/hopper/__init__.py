"""The decode megakernel for Hopper GPUs: words.py, queues.py, runner.py and the kernel itself."""
