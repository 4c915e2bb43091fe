"""Lines of a stream of server-sent events, as a client reads them."""


class EventLines:
    """Takes a response's bytes piece by piece and gives back the lines that are whole by then.

    Only a line feed ends one, with or without a carriage return before it. Text may hold Unicode's other separators,
    at which ``str.splitlines``, and so httpx, would break it.
    """

    def __init__(self) -> None:
        self._rest = b""

    def after(self, piece: bytes) -> list[str]:
        """Lines that end in ``piece``; a stream's last may end with ``after(b"\\n")``."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line.removesuffix(b"\r").decode(errors="replace") for line in lines]
