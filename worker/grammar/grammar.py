"""A grammar as a request states it: text that says what the generated text must be. Immutable, hashable, unchecked."""

from dataclasses import dataclass
from enum import StrEnum

MAX_BYTES = 64 << 10


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says which part of it and why."""


class GrammarKind(StrEnum):
    """How a grammar is written. The values are the names of the wire's fields."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """``compact`` JSON has no whitespace but one space after ``,`` and ``:``."""

    kind: GrammarKind
    text: str
    compact: bool = False

    def check_size(self) -> None:
        """Raise ``GrammarError`` if the text is empty or too long to be worth a look."""
        size = len(self.text.encode("utf-8", "replace"))
        if not self.text:
            raise GrammarError(f"the {self.kind} is empty")
        if size > MAX_BYTES:
            raise GrammarError(f"the {self.kind} has {size} bytes; at most {MAX_BYTES} are allowed")
