"""Which model a name or path means, and its weights: our own decoders (models/), or those that
transformers has (torch_import/) where ours do not cover a model.

A name or path comes in; a configuration or an open ModelSource goes out. Start at load.py;
locate.py needs no torch.
"""
