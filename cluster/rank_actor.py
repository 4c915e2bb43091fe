"""The Ray actor that carries a rank that follows: nothing but its process.

Made by its deployment in the replica's placement group; it ends when its rank does, and then the replica does too.
"""

import logging
from dataclasses import replace

import ray

from cluster.model_store import resolve_model
from kv_transfer.cluster_token import token_here
from worker.config import EngineConfig


class RankActor:
    """Rank ``rank`` of the replica ``incarnation``, whose leading rank is at ``leader``."""

    def __init__(self, config: EngineConfig, model: str, rank: int, incarnation: str, leader: str) -> None:
        logging.basicConfig(level=logging.INFO)
        self._config = on_this_machine(config, model)
        self._rank = rank
        self._incarnation = incarnation
        self._leader = leader

    def run(self) -> None:
        """Load the model and follow until the leader ends. Raises what made that impossible."""
        # Imported here: supervisors need this class too, but not torch.
        from worker.ranks.follower import Follower  # noqa: PLC0415

        Follower(self._config, self._rank, self._incarnation, self._leader).run()


def on_this_machine(config: EngineConfig, model: str) -> EngineConfig:
    """The settings of a rank that runs here: the model's files, the address for others, the cluster token's file."""
    host = config.advertised_host
    if host == "auto":
        host = ray.util.get_node_ip_address()
    token = token_here(config.token, config.cluster_token_file)
    return replace(config, model=str(resolve_model(model).weights), advertised_host=host, token=token)
