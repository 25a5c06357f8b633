"""What would run, without running it: a configuration and a machine in; facts, text or a page out.

`collect_decode` gathers the facts, `write_report` tells them, `write_page` draws them. Start at
facts.py.
"""

from distmega.cli.explain.collect import collect_decode as collect_decode
from distmega.cli.explain.collect import usual_machine as usual_machine
from distmega.cli.explain.facts import ExplainReport as ExplainReport
from distmega.cli.explain.page import write_page as write_page
from distmega.cli.explain.text import write_report as write_report
