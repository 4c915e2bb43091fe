"""README.md and docs/*.md as tests see them: shell commands, other blocks, code in the text, links and headings.

A block without a language, indented or fenced, is shell, as is one that says so. A block of anything else names it.
"""

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
SHELL = ("", "sh", "bash", "shell", "console")

_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


@dataclass(frozen=True)
class Block:
    """A fenced or indented block. ``line`` counts from 1."""

    document: Path
    line: int
    language: str
    content: str


@dataclass(frozen=True)
class Command:
    """One shell command, its lines as they stand in the document."""

    document: Path
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        """As a shell splits it, without comments."""
        return shlex.split(self.text.replace("\\\n", " "), comments=True)

    def __str__(self) -> str:
        return f"{self.document.relative_to(REPOSITORY)}:{self.line} {' '.join(self.text.split())[:60]}"


@dataclass(frozen=True)
class Span:
    """Code in a line of text, or where a link leads."""

    document: Path
    line: int
    text: str


@cache
def blocks(document: Path) -> tuple[Block, ...]:
    """Every block, in order."""
    return tuple(
        Block(document, token.map[0] + (2 if token.type == "fence" else 1), token.info.strip(), token.content)
        for token in _tokens(document)
        if token.type in ("fence", "code_block") and token.map is not None
    )


def commands(document: Path) -> Iterator[Command]:
    """Every shell command, in order."""
    for block in blocks(document):
        if block.language in SHELL:
            yield from _split(block)


def figures_after(command: Command) -> tuple[str, ...]:
    """The large numbers, as in ``147,456``, of a table that stands right behind a command's block."""
    lines = command.document.read_text().splitlines()[command.line - 1 :]
    behind = itertools.dropwhile(lambda line: not line.startswith("|") and (not line or line.startswith("    ")), lines)
    table = itertools.takewhile(lambda line: line.startswith("|"), behind)
    return tuple(re.findall(r"\d+(?:,\d{3})+", "\n".join(table)))


def code_spans(document: Path) -> Iterator[Span]:
    """What stands between backticks."""
    for line, token in _inline(document):
        if token.type == "code_inline":
            yield Span(document, line, token.content)


def links(document: Path) -> Iterator[Span]:
    """Where links and images lead."""
    for line, token in _inline(document):
        target = token.attrGet("href") if token.type == "link_open" else None
        target = token.attrGet("src") if token.type == "image" else target
        if target is not None:
            yield Span(document, line, str(target))


@cache
def anchors(document: Path) -> frozenset[str]:
    """The anchors that GitHub gives to headings."""
    seen: Counter[str] = Counter()
    found = set()
    tokens = _tokens(document)
    for token, content in itertools.pairwise(tokens):
        if token.type == "heading_open":
            text = "".join(child.content for child in content.children or () if child.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return frozenset(found)


@cache
def _tokens(document: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(document.read_text())


def _inline(document: Path) -> Iterator[tuple[int, Token]]:
    line = 0
    for token in _tokens(document):
        # Cells of a table have no line of their own; their row has.
        line = token.map[0] + 1 if token.map is not None else line
        for child in token.children or ():
            yield line, child


def _split(block: Block) -> Iterator[Command]:
    """A command ends with its line, unless a backslash, an open quote or a here-document goes on."""
    pending: list[str] = []
    until: str | None = None
    first = block.line
    for number, line in enumerate(block.content.splitlines(), block.line):
        if not pending:
            first = number
        pending.append(line)
        if until is not None:
            until = None if line.strip() == until else until
        elif heredoc := _HEREDOC.search(line):
            until = heredoc[1]
        text = "\n".join(pending)
        if until is not None or line.endswith("\\") or not _quotes_are_closed(text):
            continue
        pending = []
        if shlex.split(text, comments=True):
            yield Command(block.document, first, text)
    assert not pending, f"{block.document}:{first}: this command does not end: {pending}"


def _quotes_are_closed(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True
