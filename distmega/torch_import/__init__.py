"""Torch modules as programs: a module and example inputs in; a Captured out, whose program any plan
can run, with the module's weights bound.

Start at captured.py. conversion/ walks the exported graph; operators/ says what each operator
becomes; forms/ brings ops to the forms that kernels know; huggingface/ has decoders of
transformers.
"""

from distmega.torch_import.captured import Captured, CapturedModule, capture

__all__ = ["Captured", "CapturedModule", "capture"]
