"""Where distmega keeps what it has measured, as the platform has it: on Linux under XDG_CACHE_HOME,
else in ~/.cache.
"""

from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """Of this user; may not exist yet."""
    return user_cache_path("distmega", appauthor=False)
