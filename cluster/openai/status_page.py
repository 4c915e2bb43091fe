"""The status page at ``/``: files for a browser, and what the browser may do with them.

They are read once and hold no figures, so they need no key. What the page shows, it asks for like any other client,
with the key that it is given.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json

from cluster.openai.recent_latency import RecentLatency

DIRECTORY: Final = Path(__file__).parents[1] / "page"

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    # Nothing but these files and this server: no inline code, no markup made of strings, no frame around it.
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page; ``tag`` changes with its content."""

    media_type: str
    content: bytes
    tag: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tag", f'"{hashlib.sha256(self.content).hexdigest()[:32]}"')

    def response(self, request: Request) -> Response:
        """Return the file, or that the browser has it already."""
        headers = _HEADERS | {"ETag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=f"{self.media_type}; charset=utf-8")


def _page_files() -> dict[str, PageFile]:
    files = {
        f"/page/{path.name}": PageFile(_MEDIA_TYPES[path.suffix], path.read_bytes())
        for path in sorted(DIRECTORY.iterdir())
        if path.suffix in _MEDIA_TYPES
    }
    return {"/": files.pop("/page/index.html"), **files}


PAGE: Final = _page_files()
"""Every file by the path under which it is served."""


def add_status_page(app: FastAPI, latency: RecentLatency) -> None:
    """Add the page's files, and the figures that only it asks for."""
    for path, file in PAGE.items():
        app.add_api_route(path, file.response, methods=["GET"])

    @app.get("/latency")
    async def latency_route() -> Response:
        return Response(to_json(latency.report()), media_type="application/json")
