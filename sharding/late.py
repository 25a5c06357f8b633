"""What a plan says of itself: imported when it is asked. See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.sharding.explain import explain_plan

__all__ = ["explain_plan"]

__getattr__ = late_imports(__name__)
