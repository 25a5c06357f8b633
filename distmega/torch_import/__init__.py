"""Torch modules as programs: a module and example inputs in; a Captured out, whose program any plan
can run, with the module's weights bound.

Start at captured.py; convert.py walks the exported graph, rules.py says what operators become.
"""

from distmega.torch_import.captured import Captured, CapturedModule, capture

__all__ = ["Captured", "CapturedModule", "capture"]
