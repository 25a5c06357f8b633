"""Models: configurations, weights and tokenizers in; a decoder's tensor program out. Start at
config.py and decoder.py; sources/ opens what a name means.

gguf/ and huggingface/ read files of either form, weights/ says what a decoder's weights are, text/
has tokenizers and chat templates.
"""
