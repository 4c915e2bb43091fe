"""The data of server-sent events, as a client reads them."""


class EventData:
    """Takes a response's bytes piece by piece and gives back the data lines that are whole by then.

    Only a line feed ends a line, with or without a carriage return before it. Text may hold Unicode's other separators,
    at which ``str.splitlines``, and so httpx, would break it.
    """

    def __init__(self) -> None:
        self._rest = b""

    def after(self, piece: bytes) -> list[str]:
        """Data whose lines end in ``piece``; that of a stream's last line may end with ``after(b"\\n")``."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [
            line.removeprefix(b"data:").decode(errors="replace").strip() for line in lines if line.startswith(b"data:")
        ]
