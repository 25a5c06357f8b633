"""Models in Hugging Face folders: a path in; configuration, weights, tokenizer out. Start at
config.py."""
