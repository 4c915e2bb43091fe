"""Bounds on JSON that are known before it is parsed.

Parsing holds the interpreter, so that every stream of the front end waits for it. What makes it slow is not a body's
size but the number of its arrays and objects, of which a request needs few: texts and token ids cost a twentieth.
"""

import asyncio
import re

from cluster.openai.errors import invalid

MAX_CONTAINERS = 50_000
"""Arrays and objects of one body; they take less than 0.1 s."""
_SLICE_BYTES = 64 << 10
# A string to its closing quote, which is kept, or to the end of what is there. Nothing of it is ever looked at twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("|\\?\Z)', re.DOTALL)


async def require_few_containers(body: bytes) -> None:
    """Raise ``ApiError`` if a JSON text has more than ``MAX_CONTAINERS`` arrays and objects."""
    # Counted in what strings hold as well, because that is quick; few texts need more.
    if _opened(body) <= MAX_CONTAINERS:
        return
    found = 0
    begun = b""
    for start in range(0, len(body), _SLICE_BYTES):
        outside, strings = _STRING.subn(rb"\1", begun + body[start : start + _SLICE_BYTES])
        found += _opened(outside)
        if found > MAX_CONTAINERS:
            raise invalid(f"the body has more than {MAX_CONTAINERS} arrays and objects")
        # The last string may go on in the next slice, its last character may be escaped by this one's.
        begun = b"" if outside.count(b'"') == strings else b'"\\' if outside.endswith(b"\\") else b'"'
        await asyncio.sleep(0)


def _opened(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")
