"""The pages of the repository that people read: README, docs/, and the notes and results of bench/.

A page is Markdown with fenced blocks. A block that can't run in the tests says why in a comment
above it, `<!-- not run: reason -->`; what runs before the blocks of a page, for names that the text
takes for granted, stands in `<!-- setup ... -->`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.repo.source import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
ALL_PAGES = (*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "bench").rglob("*.md")))

_BLOCK = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->|"
    r"(?:^<!-- not run: (?P<reason>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or a set-up, in the order of the page. reason: why it does not run, or empty.
    line: where its text starts, from 1.
    """

    page: str
    line: int
    language: str
    text: str
    reason: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    found = []
    for match in _BLOCK.finditer(text):
        group = "setup" if match["setup"] is not None else "text"
        line = text.count("\n", 0, match.start(group)) + 1
        language = "setup" if group == "setup" else match["language"]
        found.append(Block(name, line, language, match[group], match["reason"] or ""))
    return found


def prose(page: Path) -> str:
    """A page without its blocks and comments."""
    text = _BLOCK.sub("", page.read_text())
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
