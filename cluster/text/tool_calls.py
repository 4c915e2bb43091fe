"""How models write tool calls into their text, and a parser that takes them out again while the text is generated.

Which way is the model's is told by its chat template, or by ``--tool-call-parser``. A choice that may call tools has a
``ToolCallParser`` from its first piece of text to its end.
"""

import json
import re
import secrets
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto


class ToolCallStyle(StrEnum):
    """The ways there are, by vLLM's names for them; ``AUTO`` is what the chat template shows."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """One way: each call is a JSON object of ``name`` and ``arguments``, which may have another name.

    ``opening`` comes before the first call and its list, ``begin`` and ``end`` around every one, ``separator`` between
    two. Without ``opening`` and ``begin`` a text that begins with an object is a call. ``id_length``: of ids, in
    characters, if the chat template insists on one.
    """

    arguments: str
    begin: str = ""
    end: str = ""
    separator: str = ""
    opening: str = ""
    id_length: int | None = None

    @property
    def marker(self) -> str:
        """The text that shows that a call begins; empty if only its object does."""
        return self.opening or self.begin.rstrip()


FORMATS = {
    ToolCallStyle.HERMES: ToolCallFormat("arguments", "<tool_call>\n", "\n</tool_call>", "\n"),
    ToolCallStyle.LLAMA3_JSON: ToolCallFormat("parameters", separator="; "),
    ToolCallStyle.MISTRAL: ToolCallFormat("arguments", separator=", ", opening="[TOOL_CALLS]", id_length=9),
}


def format_of_template(source: str) -> ToolCallFormat | None:
    """Return how a chat template shows the model to call tools; None if it is no way that is known."""
    if "<function=" in source or "[ARGS]" in source:
        return None
    if "<tool_call>" in source:
        return FORMATS[ToolCallStyle.HERMES]
    if "[TOOL_CALLS]" in source:
        return FORMATS[ToolCallStyle.MISTRAL]
    if "parameters" in source and ("<|python_tag|>" in source or "<|eot_id|>" in source):
        return FORMATS[ToolCallStyle.LLAMA3_JSON]
    return None


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of call ``index``: its id and name once, at its beginning, then pieces of its arguments' JSON."""

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Parsed:
    """What a piece of text was: content for the client to read, and calls."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class _State(Enum):
    CONTENT = auto()
    OBJECT = auto()
    """Before a call's object, or within it before its arguments."""
    ARGUMENTS = auto()
    REST = auto()
    """Behind the arguments, before the end of the call."""


_SPACE = " \t\r\n"
_STRING = r'"(?:[^"\\]|\\.)*"'
_HEADER = re.compile(rf'\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)', re.DOTALL)


class ToolCallParser:
    """See the module. What turns out to be no call is content, as it was written."""

    def __init__(self, format: ToolCallFormat) -> None:
        self._format = format
        self._state = _State.CONTENT
        self._held = ""
        self._seen_content = False
        self._scan = _ObjectScan()
        self.calls = 0

    def push(self, text: str) -> Parsed:
        """Take the next piece of text; return what is certain now."""
        self._held += text
        parsed = Parsed()
        while self._held and self._advance(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """Return what was held back when no text follows."""
        parsed = Parsed()
        held, self._held = self._held, ""
        if self._state is _State.OBJECT and held.strip(_SPACE + "[],;"):
            parsed.content = self._begun + held
        elif self._state is _State.CONTENT and not (self.calls and not held.strip()):
            parsed.content = held
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        """Go one state further; returns whether there may be more to do with what is held."""
        match self._state:
            case _State.CONTENT:
                return self._content(parsed)
            case _State.OBJECT:
                return self._object(parsed)
            case _State.ARGUMENTS:
                return self._arguments(parsed)
            case _State.REST:
                return self._rest()

    def _content(self, parsed: Parsed) -> bool:
        marker = self._format.marker
        if not marker:
            begins = self._held.lstrip(_SPACE)
            if not self._seen_content and begins.startswith("{"):
                self._held = begins
                self._state = _State.OBJECT
                return True
            if begins:
                self._show(parsed, len(self._held))
            return False
        at = self._held.find(marker)
        if at < 0:
            # What may become the marker, and space before it, waits.
            kept = next((n for n in range(len(marker) - 1, 0, -1) if self._held.endswith(marker[:n])), 0)
            self._show(parsed, len(self._held[: len(self._held) - kept].rstrip(_SPACE)))
            return False
        self._show(parsed, len(self._held[:at].rstrip(_SPACE)))
        self._held = self._held.lstrip(_SPACE)[len(marker) :]
        self._state = _State.OBJECT
        return True

    def _show(self, parsed: Parsed, length: int) -> None:
        parsed.content += self._held[:length]
        self._held = self._held[length:]
        self._seen_content = self._seen_content or length > 0

    def _object(self, parsed: Parsed) -> bool:
        text = self._held.lstrip(_SPACE + ("[],;" if self.calls or self._format.opening else ""))
        if not text:
            return False
        if not text.startswith("{"):
            return self._no_call(parsed)
        header = _HEADER.match(text)
        if header is None:
            return self._unusual_object(parsed, text)
        self._begin(parsed, json.loads(header[1], strict=False))
        self._held = text[header.end() :]
        self._scan = _ObjectScan()
        self._state = _State.ARGUMENTS
        return True

    def _unusual_object(self, parsed: Parsed, text: str) -> bool:
        """Look at an object as a whole, once it is there, that does not begin with a name and then its arguments."""
        end = _ObjectScan().end(text)
        if end is None:
            return False
        try:
            call = json.loads(text[:end], strict=False)
        except (ValueError, RecursionError):
            return self._no_call(parsed)
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
            return self._no_call(parsed)
        self._begin(parsed, call["name"])
        parsed.calls.append(CallDelta(self.calls - 1, json.dumps(arguments, ensure_ascii=False)))
        self._held = "}" + text[end:]
        self._state = _State.REST
        return True

    def _no_call(self, parsed: Parsed) -> bool:
        """Show what is held, with the marker before it, and look on from behind."""
        self._held = self._begun + self._held
        self._show(parsed, len(self._held))
        self._state = _State.CONTENT
        return False

    @property
    def _begun(self) -> str:
        """What was taken for the beginning of the call that is held."""
        return self._format.marker if self._format.begin or not self.calls else ""

    def _begin(self, parsed: Parsed, name: str) -> None:
        length = self._format.id_length
        call_id = f"call_{secrets.token_hex(12)}" if length is None else secrets.token_hex(length)[:length]
        parsed.calls.append(CallDelta(self.calls, call_id=call_id, name=name))
        self.calls += 1

    def _arguments(self, parsed: Parsed) -> bool:
        end = self._scan.end(self._held)
        taken = len(self._held) if end is None else end
        parsed.calls.append(CallDelta(self.calls - 1, self._held[:taken]))
        self._held = self._held[taken:]
        if end is not None:
            self._state = _State.REST
        return end is not None

    def _rest(self) -> bool:
        closing = self._format.end.strip() or "}"
        at = self._held.find(closing)
        if at < 0:
            return False
        self._held = self._held[at + len(closing) :]
        self._state = _State.CONTENT if self._format.begin else _State.OBJECT
        return True


class _ObjectScan:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Return the position after the object's last brace, if it is in this piece."""
        for position, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
        return None
