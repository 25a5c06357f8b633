"""Rewrite rules, which few programs that an earlier process left behind ask for: imported when they
are used. See distmega/lazy.py."""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.superopt.rules import RewriteRule, shipped_rules

__all__ = ["RewriteRule", "shipped_rules"]

__getattr__ = late_imports(__name__)
