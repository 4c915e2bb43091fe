"""A process group's rendezvous store in another process, reached over the gRPC connection that is there anyway."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import grpc
from torch._C._distributed_c10d import Store

from kv_transfer.pair_group import RENDEZVOUS_SECONDS
from kv_transfer.wire import kv_transfer_pb2 as wire

_SPARE_SECONDS = 2.0
_LOOK_SECONDS = 0.01


class GroupStore(Store):
    """``call`` is a Store method; ``decode_incarnation`` and ``generation`` name a pair's group.

    Operations give up after ``patience`` seconds. Every one raises ``RuntimeError`` when it fails or takes too long.
    """

    def __init__(
        self,
        call: Callable[..., bytes],
        decode_incarnation: str = "",
        generation: int = 0,
        patience: float = RENDEZVOUS_SECONDS,
    ) -> None:
        super().__init__()
        self._call = call
        self._decode_incarnation = decode_incarnation
        self._generation = generation
        self._patience = patience

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value."""
        encoded = value.encode() if isinstance(value, str) else bytes(value)
        self._ask(wire.StoreRequest(key=key, set=encoded), self._patience)

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        return self._get(key, self._patience)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys have values."""
        seconds = self._patience if timeout is None else timeout.total_seconds()
        for key in keys:
            self._get(key, seconds)

    def _get(self, key: str, seconds: float) -> bytes:
        return self._ask(wire.StoreRequest(key=key, get=max(1, round(seconds * 1e3))), seconds)

    def _ask(self, request: wire.StoreRequest, seconds: float) -> bytes:
        request.decode_incarnation = self._decode_incarnation
        request.generation = self._generation
        try:
            return self._call(request.SerializeToString(), timeout=seconds + _SPARE_SECONDS)
        except grpc.RpcError as error:
            raise RuntimeError(f"rendezvous at {request.key}: {error.code().name}: {error.details()}") from error
        except ValueError as error:
            raise RuntimeError(f"rendezvous at {request.key}: {error}") from error


def answer(store: Store, request: wire.StoreRequest, asked: Callable[[], bool]) -> bytes:
    """The other process's part, for as long as ``asked`` says that somebody still waits.

    Raises ``RuntimeError`` for a key that does not get a value in time, and for a request that asks for nothing.
    """
    if request.WhichOneof("operation") == "set":
        store.set(request.key, request.set)  # type: ignore[arg-type]
        return b""
    if not request.get:
        # To a store it would mean for ever.
        raise RuntimeError(f"a request for {request.key} that is neither a value nor a time to wait")
    deadline = time.monotonic() + request.get / 1e3
    while not store.check([request.key]):
        if time.monotonic() > deadline or not asked():
            raise RuntimeError(f"{request.key} has got no value within {request.get} ms")
        time.sleep(_LOOK_SECONDS)
    return bytes(store.get(request.key))
