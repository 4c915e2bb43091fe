"""Servers and peers that a test has to itself."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kv_transfer.connection import Decode, NewDecode, NewPrefill, Prefill


@pytest.fixture
def new_prefill() -> Iterator[NewPrefill]:
    """Makes servers and stops them."""
    made: list[Prefill] = []

    def make(**options: Any) -> Prefill:
        made.append(Prefill(**options))
        return made[-1]

    yield make
    for prefill in made:
        prefill.server.stop(0.0)


@pytest.fixture
def prefill(new_prefill: NewPrefill) -> Prefill:
    return new_prefill()


@pytest.fixture
def new_decode() -> Iterator[NewDecode]:
    """Makes peers and closes them, so that no thread waits for a stream or for room after a test."""
    made: list[Decode] = []

    def make(address: str, **options: Any) -> Decode:
        made.append(Decode(address, **options))
        return made[-1]

    yield make
    for decode in made:
        decode.close()


@pytest.fixture
def decode(prefill: Prefill, new_decode: NewDecode) -> Decode:
    decode = new_decode(prefill.address)
    decode.peer.connect()
    return decode
