"""Regular expressions: what XGrammar would silently take for something else is refused or rewritten here.

XGrammar matches a whole text, and drops an anchor that stands elsewhere than at an end of an alternative. In a schema's
``pattern`` it drops lookarounds, and what is not ASCII or has no match without JSON's escapes it matches against the
JSON text instead of the string that the text stands for.
"""

import re

from worker.grammar.grammar import GrammarError

_CLASSES = "dDwWsS"
_CONTROLS = {"f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_LOOKAROUND = re.compile(r"\(\?(=|!|<=|<!)")

# Characters as they are, not \u: that has it matched against the JSON text, where JSON's own escapes can be said.
_PLAIN = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
_SHORT_ESCAPE = r'\\(?:"|\\|/|b|f|n|r|t)'


def check_regex(regex: str) -> None:
    """Raise ``GrammarError`` for what would be ignored: lookarounds, and anchors within an alternative."""
    _scan(regex, in_json=False)


def json_pattern(pattern: str) -> str:
    """Return a schema's ``pattern`` in ASCII.

    Raises ``GrammarError`` for what ``check_regex`` refuses and for characters that JSON escapes.
    """
    return _scan(pattern, in_json=True)


def length_pattern(shortest: int, longest: int | None) -> str:
    """Return the expression for the JSON text of strings of so many characters.

    XGrammar's own bounds let control characters through, which JSON forbids.
    """
    bounds = f"{{{shortest},{'' if longest is None else longest}}}"
    return f"^(?:{_PLAIN}|{_SHORT_ESCAPE}){bounds}$"


def _scan(regex: str, *, in_json: bool) -> str:
    if (lookaround := _LOOKAROUND.search(regex)) is not None:
        raise GrammarError(f"{regex!r:.100} has {lookaround[0]}…), and lookarounds are not supported")
    parts: list[str] = []
    position = 0
    class_end = 0
    excludes = False
    while position < len(regex):
        within_class = position < class_end
        character = regex[position]
        if character == "[" and not within_class:
            class_end = _end_of_class(regex, position)
            excludes = regex.startswith("^", position + 1)
        elif character in "^$" and not within_class:
            _check_anchor(regex, position)
        length, literal = _literal(regex, position)
        text = regex[position : position + length]
        if in_json and literal is not None and not (within_class and excludes) and _is_escaped(literal):
            raise GrammarError(f"{regex!r:.100} has {literal!r}, and what JSON escapes is not supported")
        parts.append(f"\\u{{{ord(text):x}}}" if in_json and not text.isascii() and len(text) == 1 else text)
        position += length
    return "".join(parts)


def _end_of_class(regex: str, start: int) -> int:
    """Return the position after the class that begins at ``start``."""
    position = start + 1
    while position < len(regex) and regex[position] != "]":
        position += 2 if regex[position] == "\\" else 1
    if position >= len(regex):
        raise GrammarError(f"{regex!r:.100} has a [ without its ]")
    return position + 1


def _check_anchor(regex: str, position: int) -> None:
    if regex[position] == "^":
        placed = position == 0 or _begins_alternative(regex, position)
    else:
        placed = regex[position + 1 : position + 2] in ("", "|", ")")
    if not placed:
        raise GrammarError(f"{regex!r:.100} has {regex[position]!r} in its middle, where it would match nothing")


def _begins_alternative(regex: str, position: int) -> bool:
    """Whether what stands before is a ``|``, a ``(`` or a ``(?:`` that is not escaped."""
    opening = position - 3 if regex.startswith("(?:", max(0, position - 3)) else position - 1
    backslashes = 0
    while backslashes < opening and regex[opening - 1 - backslashes] == "\\":
        backslashes += 1
    return regex[opening] in "|(" and backslashes % 2 == 0


def _literal(regex: str, position: int) -> tuple[int, str | None]:
    """Return how long the element at ``position`` is, and the character that it stands for, if it is one character."""
    character = regex[position]
    if character != "\\":
        return 1, None if character in "^$.|?*+(){}" else character
    if position + 1 == len(regex):
        raise GrammarError(f"{regex!r:.100} ends with a backslash")
    if (code := _CODE.match(regex, position + 1)) is not None:
        value = int(next(group for group in code.groups() if group), 16)
        if value > 0x10FFFF or 0xD800 <= value <= 0xDFFF:
            raise GrammarError(f"{regex!r:.100}: there is no character {code[0]}")
        return len(code[0]) + 1, chr(value)
    escaped = regex[position + 1]
    if escaped in _CONTROLS:
        return 2, _CONTROLS[escaped]
    if escaped in _CLASSES:
        return 2, None
    if escaped.isalnum():
        raise GrammarError(f"{regex!r:.100}: \\{escaped} is not supported")
    return 2, escaped


def _is_escaped(character: str) -> bool:
    return character in '"\\' or character < " "
