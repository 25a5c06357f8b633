"""How tasks of one op follow those of another: `Mode`. Used by graph.py and by kernels' plans."""

from typing import Literal

Mode = Literal["overlap", "op"]
"""Each task waits for those that made what it reads, or for all of the ops before."""
