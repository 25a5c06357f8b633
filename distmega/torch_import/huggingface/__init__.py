"""Decoders of transformers as programs, and their folders as sources of weights.

A configuration of transformers, or a folder, comes in; an HfDecoder goes out, with programs of the
same inputs, outputs and caches as the built-in families have. Start at decoders.py; attention.py
has what a model is given while it is captured, masks.py what is asked of masks, source.py reads
folders.
"""
