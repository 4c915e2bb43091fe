"""What a client makes of a stream of server-sent events."""

import json
from typing import Any


def events_of(text: str) -> list[dict[str, Any] | str]:
    """Return each event's JSON, or its text if it has none; anything that is not an event is an error."""
    assert text.endswith("\n\n")
    events: list[dict[str, Any] | str] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def chunks_of(text: str) -> list[dict[str, Any]]:
    """Return the chunks of a stream that ended well."""
    *chunks, done = events_of(text)
    assert done == "[DONE]"
    return chunks


def chat_texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    return texts
