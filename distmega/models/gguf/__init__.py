"""Models in GGUF files: a path in; configuration, weight readers and tokenizer out. Start at
file.py."""
