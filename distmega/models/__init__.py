"""Models: configurations, weights and tokenizers in; a decoder's tensor program out. Start at
config.py and decoder.py; sources/ opens what a name means.
"""
