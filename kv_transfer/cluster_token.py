"""The cluster token: what a process must know to speak to another of its cluster, on every gRPC port.

All processes of one application are given the same ``ClusterToken``. Whoever opens a channel sends it with each call;
a server compares it before it reads anything of the call. It shows who belongs to the cluster; it hides nothing, so a
network on which others can listen needs encryption beneath.
"""

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HEADER = "crosskv-cluster-token"
MIN_CHARACTERS = 16
_MAX_FILE_BYTES = 4096
_REMEDY = "give every replica and front end the same --cluster-token-file (or CROSSKV_CLUSTER_TOKEN), and restart them"


class ClusterTokenError(ValueError):
    """A token that cannot be used. The message names the file, and never the token."""


@dataclass(frozen=True, slots=True)
class ClusterToken:
    """See the module. Visible ASCII characters, at least ``MIN_CHARACTERS``. Raises ``ClusterTokenError``."""

    value: str = field(repr=False)

    def __post_init__(self) -> None:
        """Refuse what a header cannot carry or anybody may guess."""
        if not (self.value.isascii() and self.value.isprintable() and " " not in self.value):
            raise ClusterTokenError("the cluster token must be visible ASCII characters without spaces")
        if len(self.value) < MIN_CHARACTERS:
            raise ClusterTokenError(f"the cluster token must have at least {MIN_CHARACTERS} characters")

    @classmethod
    def new(cls) -> "ClusterToken":
        """Return one that nobody has had before."""
        return cls(secrets.token_urlsafe(32))

    @classmethod
    def read(cls, file: Path) -> "ClusterToken":
        """Return the token that a file holds. Raises ``ClusterTokenError``."""
        try:
            with file.open("rb") as content:
                text = content.read(_MAX_FILE_BYTES).decode()
            return cls(text.strip())
        except OSError as error:
            raise ClusterTokenError(f"--cluster-token-file {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ClusterTokenError(f"--cluster-token-file {file}: it is not text") from None
        except ClusterTokenError as error:
            raise ClusterTokenError(f"--cluster-token-file {file}: {error}") from None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call carries."""
        return ((HEADER, self.value),)

    def problem(self, metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
        """Return why a call with this metadata is not from our cluster, or None if it is. In constant time."""
        given = [value for key, value in metadata if key == HEADER]
        if len(given) != 1:
            return f"the call has no cluster token: {_REMEDY}"
        value = given[0].encode() if isinstance(given[0], str) else given[0]
        if not hmac.compare_digest(value, self.value.encode()):
            return f"the call has the token of another cluster: {_REMEDY}"
        return None


def token_here(token: ClusterToken | None, file: Path | None) -> ClusterToken | None:
    """Return the token that this machine's file holds, or else ``token``. Raises ``ClusterTokenError``."""
    return token if file is None else ClusterToken.read(file)


def metadata_of(token: ClusterToken | None) -> tuple[tuple[str, str], ...]:
    """Return what a call carries in a cluster with this token; in one without, nothing."""
    return () if token is None else token.metadata
