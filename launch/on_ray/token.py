"""The token by which Ray's clusters know their users: where there is one, it is shown.

Comes in: the environment, before Ray is imported, which reads it then. Used by launch/launchers.py;
launch/ray_job.sh does the same.
"""

from collections.abc import MutableMapping
from pathlib import Path

TOKEN = ".ray/auth_token"


def show_token(environment: MutableMapping[str, str]) -> None:
    """Sets RAY_AUTH_MODE=token where there is a token and nothing is said: clusters that are
    started beside one demand it, and a client that is not told so (Ray 2.60) forgets it.
    """
    given = environment.get("RAY_AUTH_TOKEN_PATH")
    path = Path(given or Path(environment.get("HOME", "~"), TOKEN)).expanduser()
    has_token = bool(environment.get("RAY_AUTH_TOKEN")) or path.is_file()
    if has_token and not environment.get("RAY_AUTH_MODE"):
        environment["RAY_AUTH_MODE"] = "token"
