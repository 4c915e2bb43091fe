"""TCP ports of this machine, looked at before anything is started on them."""

import ipaddress
import socket

from cluster.errors import CrosskvError


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody uses now."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


def require_free_port(host: str, port: int) -> None:
    """Raise ``CrosskvError`` unless a server could listen there."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
    except OSError as error:
        raise CrosskvError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens there."""
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
