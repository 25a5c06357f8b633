"""Models: configurations, weights and tokenizers in; a decoder's tensor program out. Start at
load.py and decoder.py.
"""
