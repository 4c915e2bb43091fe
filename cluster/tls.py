"""TLS of the API: the front end's certificate, and whom a client trusts.

A ``TlsFiles`` names files; they are read by the process that uses them.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import CrosskvError


class TlsError(CrosskvError):
    """A certificate or key that cannot be used. The message names the flag and the file."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate chain and its private key, as PEM files."""

    certificate: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        """Return what a server answers with: TLS 1.2 or newer. Raises ``TlsError``."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        for flag, file in (("--tls-certificate", self.certificate), ("--tls-key", self.key)):
            try:
                file.open("rb").close()
            except OSError as error:
                raise TlsError(f"{flag} {file}: {error.strerror}") from None
        try:
            # A prompt for a password would wait for somebody who is not there.
            context.load_cert_chain(self.certificate, self.key, password=b"")
        except ssl.SSLError as error:
            raise TlsError(
                f"--tls-certificate {self.certificate}, --tls-key {self.key}: not a certificate and its key without a "
                f"password, in PEM: {error.reason or error}"
            ) from None
        return context

    def own_context(self) -> ssl.SSLContext:
        """Return what whoever started the server asks it with: nothing but this certificate, under whatever name."""
        context = client_context(self.certificate)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context


def client_context(ca: Path | None) -> ssl.SSLContext:
    """Return whom a client trusts: the certificates in ``ca``, or else those of the system. Raises ``TlsError``."""
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError:
        raise TlsError(f"--ca {ca}: it holds no certificate in PEM") from None
    except OSError as error:
        raise TlsError(f"--ca {ca}: {error.strerror}") from None
