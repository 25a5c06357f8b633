"""Text to token ids and back.

A tokenizer's file and chat template come in; prompts as ids, and answers as text, go out. Read
tokenizer.py first; templates are rendered in a process of their own.
"""
