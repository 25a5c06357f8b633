"""See README.md, "the walk through the code"."""
