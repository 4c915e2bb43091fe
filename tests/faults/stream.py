"""A streamed completion, read on a thread of its own, so that a test can do something to the cluster meanwhile."""

import json
import threading
import time
from typing import Any, Self

import httpx


class Stream:
    """Greedy tokens of ``prompt``. ``error`` is set when it broke off, ``done`` when it ended well."""

    def __init__(self, base_url: str, prompt: list[int], max_tokens: int, salt: str) -> None:
        self._url = f"{base_url}/v1/completions"
        self._body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        self.tokens: list[int] = []
        self.text = ""
        self.done = False
        self.error: str | None = None
        self.arrivals: list[float] = []
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @classmethod
    def whole(cls, base_url: str, prompt: list[int], max_tokens: int, salt: str) -> Self:
        """One that has ended well."""
        stream = cls(base_url, prompt, max_tokens, salt)
        stream.wait_for_end(120.0)
        assert stream.done, stream.error
        return stream

    @property
    def over(self) -> bool:
        return self.done or self.error is not None

    def wait_for_tokens(self, count: int, seconds: float) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.over or len(self.tokens) >= count, seconds), "no tokens"
        assert len(self.tokens) >= count, self.error

    def wait_for_end(self, seconds: float) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.over, seconds), f"it hangs after {len(self.tokens)} tokens"

    def leave(self) -> None:
        """Leave with the next token, as a client does that has heard enough."""
        self._closing = True

    def _read(self) -> None:
        try:
            timeout = httpx.Timeout(10.0, read=180.0)
            with httpx.stream("POST", self._url, json=self._body, timeout=timeout) as response:
                if response.status_code != 200:
                    self._end(f"{response.status_code}: {response.read()[:200]!r}")
                    return
                pending = b""
                for part in response.iter_bytes():
                    # By hand: httpx also ends lines at characters that JSON leaves as they are.
                    *events, pending = (pending + part).split(b"\n\n")
                    for event in events:
                        self._take(event.removeprefix(b"data: "))
                    if self._closing:
                        break
        except httpx.HTTPError as error:
            self._end(f"{type(error).__name__}: {error}")
        if not self.over:
            self._end("closed" if self._closing else "the stream ended without [DONE]")

    def _take(self, data: bytes) -> None:
        with self._changed:
            if data == b"[DONE]":
                self.done = True
            else:
                event = json.loads(data)
                if "error" in event:
                    self.error = event["error"]["message"]
                for choice in event.get("choices", ()):
                    self.arrivals.append(time.monotonic())
                    self.tokens += choice["token_ids"]
                    self.text += choice["text"]
            self._changed.notify_all()

    def _end(self, error: str) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
