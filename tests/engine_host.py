"""What runs in an engine process, and does what ``EngineProcess`` is told."""

import ctypes
import gc
import logging
import os
import threading
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection

import psutil

from cluster.model_store import resolve_model
from cluster.text.vocabulary import vocabulary_of
from worker.config import EngineConfig
from worker.grammar.vocabulary import Vocabulary
from worker.prefill_selector import PrefillCandidate
from worker.ranks.follower import Follower
from worker.ranks.followers import Followers
from worker.replica import Replica, new_incarnation
from worker.replica_record import ReplicaRecord


class LeastOutstanding:
    """A prefill selector: the replica with the least to do, then by name."""

    def choose(self, candidates: Sequence[PrefillCandidate], token_ids: Sequence[int], salt: str) -> str:
        del token_ids, salt
        return min(candidates, key=lambda candidate: (candidate.outstanding_tokens, candidate.incarnation)).incarnation


class EngineHost:
    """At most one replica at a time, or one rank that follows another process."""

    def __init__(self) -> None:
        self._replica: Replica | None = None
        self._followers: Followers | None = None
        self._following: threading.Thread | None = None

    def start(self, config: EngineConfig, fill: int) -> ReplicaRecord:
        if self._replica is not None:
            self.stop()
        vocabulary = partial(_vocabulary, config.model)
        self._replica = Replica(config, LeastOutstanding(), self._followers, vocabulary, fill=fill)
        return self._replica.record

    def lead(self, config: EngineConfig) -> tuple[str, str]:
        """Open the place where other ranks join the replica that ``start`` will make."""
        self.stop()
        incarnation = new_incarnation(config.role)
        self._followers = Followers(incarnation, config.tensor_parallel_size, config.advertised_host, config.token)
        return incarnation, self._followers.address

    def follow(self, config: EngineConfig, rank: int, incarnation: str, leader: str, fill: int) -> None:
        """Be a rank of another process's replica until that ends."""
        self.stop()

        def run() -> None:
            try:
                Follower(config, rank, incarnation, leader, fill=fill).run()
            except Exception:
                traceback.print_exc()

        self._following = threading.Thread(target=run)
        self._following.start()

    def use_prefill_replicas(self, replicas: dict[str, tuple[str, ...]], draining: frozenset[str]) -> None:
        assert self._replica is not None
        self._replica.use_prefill_replicas(replicas, draining)

    def drain(self, seconds: float) -> bool:
        assert self._replica is not None
        return self._replica.drain(seconds)

    def resident_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def require_health(self) -> None:
        assert self._replica is not None
        self._replica.require_health()

    def stop(self) -> None:
        if self._replica is not None:
            self._replica.stop(grace=0.0)
            self._replica = None
        if self._followers is not None:
            self._followers.stop()
        self._followers = None
        if self._following is not None:
            self._following.join()
            self._following = None
        # Replicas of one process have threads of their own, and each thread its part of the heap, which keeps what is
        # freed: after dozens of them gigabytes.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def _vocabulary(model: str) -> Vocabulary:
    return vocabulary_of(resolve_model(model).tokenizer)


def serve(connection: Connection) -> None:
    """Serve the parent's calls until it closes the connection or dies."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(message)s")
    engine = EngineHost()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            break
        try:
            connection.send((getattr(engine, method)(*arguments), None))
        except Exception:
            connection.send((None, traceback.format_exc()))
    os._exit(0)


def serve_at(descriptor: int) -> None:
    """The same, of a process that was not forked."""
    serve(Connection(descriptor))
