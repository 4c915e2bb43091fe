"""How a front end says that it will soon close: not healthy any more, and every answer is a connection's last.

Around the HTTP application from its start. Requests are served as before, so that nobody who comes late is refused.
"""

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Farewell:
    """``said`` is set once, from any thread."""

    def __init__(self) -> None:
        self.said = False

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return the application with the farewell in it."""

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_last(message: Message) -> None:
                # Looked at when the answer begins: whoever asked before learns it as well.
                if self.said and message["type"] == "http.response.start":
                    MutableHeaders(scope=message)["Connection"] = "close"
                await send(message)

            if scope["type"] != "http":
                await app(scope, receive, send)
            elif self.said and scope["path"] == "/health":
                await Response(status_code=503)(scope, receive, send_last)
            else:
                await app(scope, receive, send_last)

        return wrapped
