"""Names of joined weights: memory from one weight to another as one, which join_products.py makes.

In: a name. Out: the weight with which it begins. Used by engine/opening.py.
"""

from collections.abc import Container

SPAN = "@"
"""Between the names of the first and the last weight that a joined one covers. Weights that are
computed of others have it in their own names.
"""


def first_covered(name: str, weights: Container[str]) -> str:
    """The first of the weights that the joined weight `name` covers."""
    signs = (at for at, letter in enumerate(name) if letter == SPAN)
    return next(name[:at] for at in signs if name[:at] in weights and name[at + 1 :] in weights)
