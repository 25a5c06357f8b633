"""What would run, without running it: a configuration and a machine in; facts, text or a page out.

`collect_decode` gathers the facts, `write_report` tells them, `write_page` draws them; command.py
has the flags. Start at facts.py. All else is imported when it is used: the other commands do
without.
"""

from typing import TYPE_CHECKING

from distmega.lazy import late_imports

if TYPE_CHECKING:
    from distmega.cli.explain.collect import collect_decode, usual_machine
    from distmega.cli.explain.facts import ExplainReport
    from distmega.cli.explain.page import write_page
    from distmega.cli.explain.text import write_report

__all__ = ["ExplainReport", "collect_decode", "usual_machine", "write_page", "write_report"]

__getattr__ = late_imports(__name__)
