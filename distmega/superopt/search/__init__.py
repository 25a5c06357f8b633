"""All graphs, within bounds, that compute what a program does.

A Program comes in; uGraphs go out, the fastest first, equal to the program as far as the laws of
algebra in laws.py say; nothing here proves it. Read search.py first.
"""
