"""API keys: who may use the API, by which name each of them goes.

A front end makes one ``ApiKeys`` when it starts. Keys from a file are read again when the file changes, so that a key
can be added or withdrawn while requests run. Only digests are kept and handed from process to process; no key is ever
in a log, in ``repr`` or in what Ray records of a deployment.
"""

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.errors import CrosskvError

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often the file is looked at, and so how long a key that was withdrawn may still work."""
_MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_KEY = re.compile(r"[!-~]{1,512}")


class ApiKeyError(CrosskvError):
    """Keys that cannot be used. The message names the file and the line, and never a key."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from: the name of its API key. Several keys may have one name, and are then one caller."""

    name: str


ANYBODY = Caller("")
"""Every caller of a front end without keys."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key as it is kept: its caller's name, and the key's SHA-256."""

    name: str
    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, key: str, name: str | None = None) -> "ApiKey":
        """Return what is kept of ``key``. One without a name gets one that says nothing about the key."""
        digest = _digest(key.encode())
        return cls(name or f"key-{hashlib.sha256(digest).hexdigest()[:8]}", digest)


class ApiKeys:
    """``fixed`` never change; those of ``file`` do. Without either, everybody is admitted. Used by one event loop."""

    def __init__(
        self, fixed: Sequence[ApiKey] = (), file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the file. Raises ``ApiKeyError``."""
        self._fixed = tuple(fixed)
        self._file = file
        self._clock = clock
        self._looked = clock()
        self._version = None if file is None else _version(file)
        self._keys = self._fixed + (() if file is None else read_keys(file))

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._keys) or self._file is not None

    def caller(self, authorization: bytes) -> Caller | None:
        """Return who sent this ``Authorization`` header, or None for nobody we know.

        Every key is compared, in constant time, whether or not an earlier one fits.
        """
        if not self.required:
            return ANYBODY
        self._look()
        scheme, _, key = authorization.partition(b" ")
        digest = _digest(key.strip())
        found: ApiKey | None = None
        for each in self._keys:
            if hmac.compare_digest(each.digest, digest):
                found = each
        return Caller(found.name) if found is not None and scheme.lower() == b"bearer" else None

    def _look(self) -> None:
        """Read a file that has changed. One that cannot be used changes nothing: what was valid before stays valid."""
        now = self._clock()
        if self._file is None or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        try:
            version = _version(self._file)
            if version == self._version:
                return
            self._version = version
            self._keys = self._fixed + read_keys(self._file)
        except ApiKeyError as error:
            log.error("the API keys stay as they were: %s", error)
            return
        log.info("%s was read again: %d API keys", self._file, len(self._keys))


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file: one ``name:key`` or key a line; empty lines and those with # say nothing.

    Raises ``ApiKeyError`` for a file that cannot be read, a line that is no key, and a file without keys.
    """
    try:
        with file.open("rb") as content:
            text = content.read(_MAX_FILE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ApiKeyError(f"--api-key-file {file}: {reason}") from None
    if len(text) > _MAX_FILE_BYTES:
        raise ApiKeyError(f"--api-key-file {file}: it is larger than {_MAX_FILE_BYTES} bytes")
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        name, colon, key = entry.partition(":")
        if not colon:
            name, key = "", entry
        elif not _NAME.fullmatch(name):
            raise ApiKeyError(f"--api-key-file {file}, line {number}: a name is up to 64 letters, digits, . _ and -")
        if not _KEY.fullmatch(key):
            raise ApiKeyError(
                f"--api-key-file {file}, line {number}: a key is 1 to 512 visible ASCII characters without spaces"
            )
        made = ApiKey.of(key, name or None)
        if made.digest in keys:
            raise ApiKeyError(f"--api-key-file {file}, line {number}: this key was there before")
        keys[made.digest] = made
    if not keys:
        raise ApiKeyError(f"--api-key-file {file}: it holds no key")
    return tuple(keys.values())


def _version(file: Path) -> tuple[int, int, int]:
    """What differs when a file was written again, or another was put in its place. Raises ``ApiKeyError``."""
    try:
        found = os.stat(file)
    except OSError as error:
        raise ApiKeyError(f"--api-key-file {file}: {error.strerror}") from None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
