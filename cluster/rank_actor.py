"""The Ray actor that carries a rank that follows: nothing but its process.

Made by its deployment in the replica's placement group; it ends when its rank does, and then the replica does too. On
SIGTERM the whole replica finishes what it has first.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import ray

from cluster.garbage import made_to_stay
from cluster.model_store import resolve_model
from kv_transfer.cluster_token import token_here
from worker.config import EngineConfig, Role

if TYPE_CHECKING:
    from worker.ranks.follower import Follower

PREFILL_NICENESS = 5
"""Of a prefill replica's computing threads on a CPU, added to that of its process. Measured in docs/performance.md."""


class RankActor:
    """Rank ``rank`` of the replica ``incarnation``, whose leading rank is at ``leader``."""

    def __init__(self, config: EngineConfig, model: str, rank: int, incarnation: str, leader: str) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = on_this_machine(config, model)
        self._rank = rank
        self._incarnation = incarnation
        self._leader = leader
        self._follower: Follower | None = None
        on_sigterm(self._told_to_end)

    def run(self) -> None:
        """Load the model and follow until the leader ends. Raises what made that impossible."""
        with made_to_stay():
            # Imported here: supervisors need this class too, but not torch.
            from worker.ranks.follower import Follower  # noqa: PLC0415

            give_way(self._config)
            self._follower = Follower(self._config, self._rank, self._incarnation, self._leader)
        self._follower.run()

    def _told_to_end(self) -> None:
        if self._follower is None:
            sys.exit("told to end before it followed")
        self._follower.leave()


def on_sigterm(told: Callable[[], None]) -> None:
    """Call ``told``, in the main thread, when this actor's process gets SIGTERM. Called by the actor's constructor.

    Ray makes actors in the main thread, and has looked out for signals by then: its handler ends the process at once.
    """
    signal.signal(signal.SIGTERM, lambda *_: told())


def give_way(config: EngineConfig) -> None:
    """Let prompts that are computed on a CPU wait for whoever else wants it; called by who then makes the threads.

    On a machine that also generates, transfers and clients would otherwise be served at the expense of both roles
    alike, and a decode step that waits is a token that comes late.
    """
    from worker.dtype import choose_device  # noqa: PLC0415 - as above

    if config.role is Role.PREFILL and choose_device(config.device).type == "cpu":
        os.nice(PREFILL_NICENESS)


def on_this_machine(config: EngineConfig, model: str) -> EngineConfig:
    """The settings of a rank that runs here: the model's files, the address for others, the cluster token's file."""
    host = config.advertised_host
    if host == "auto":
        host = ray.util.get_node_ip_address()
    token = token_here(config.token, config.cluster_token_file)
    return replace(config, model=str(resolve_model(model).weights), advertised_host=host, token=token)
