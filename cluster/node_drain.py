"""Draining one node of a Ray cluster, as before its pod ends.

Ray is told that the node will be gone at a certain time, and gives it nothing new. Serve reads that: it starts a
successor of every replica there elsewhere, and then, or when what is left is just enough for draining, has the replica
finish what it was asked for and end.
"""

import asyncio
import time

from ray import NodeID
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2, gcs_pb2

from cluster.errors import CrosskvError

ANSWER_SECONDS = 5.0
POLL_SECONDS = 0.5


class DrainFailed(CrosskvError):
    """The node cannot be drained, or was not within its time; the message says why."""


def ray_cluster(address: str | None) -> str:
    """``host:port`` of a Ray cluster's control store; of the one on this machine if ``address`` is None or ``auto``."""
    found = canonicalize_bootstrap_address(address)
    if found is None:
        raise DrainFailed("no Ray cluster is known here; give --ray-address or RAY_ADDRESS")
    return str(found)


async def drain_node(ray_address: str, node_ip_address: str, seconds: float) -> None:
    """Have the node end in ``seconds``; return when no actor is left on it, or it is gone. Raises ``DrainFailed``.

    ``ray_address`` is host:port of Ray's control store.
    """
    client = GcsClient(address=ray_address)
    node = await asyncio.to_thread(_alive_node, client, node_ip_address)
    deadline = time.time() + seconds
    accepted, reason = client.drain_node(
        node.hex(),
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "its pod is being deleted",
        int(deadline * 1e3),
        timeout=ANSWER_SECONDS,
    )
    if not accepted:
        raise DrainFailed(f"Ray refuses to drain {node_ip_address}: {reason}")
    while left := await _actors_on(client, node):
        if time.time() > deadline:
            raise DrainFailed(f"after {seconds:.0f} s there is still on {node_ip_address}: {', '.join(left)}")
        await asyncio.sleep(POLL_SECONDS)


def _alive_node(client: GcsClient, address: str) -> NodeID:
    nodes = client.get_all_node_info(timeout=ANSWER_SECONDS, state_filter=gcs_pb2.GcsNodeInfo.GcsNodeState.ALIVE)
    found = [node for node, info in nodes.items() if info.node_manager_address == address]
    if len(found) != 1:
        known = ", ".join(sorted(info.node_manager_address for info in nodes.values()))
        raise DrainFailed(f"--node-ip-address {address} is the address of {len(found)} nodes; there are {known}")
    return found[0]


async def _actors_on(client: GcsClient, node: NodeID) -> list[str]:
    """Class names of the actors that live there."""
    actors = await client.async_get_all_actor_info(actor_state_name="ALIVE", timeout=ANSWER_SECONDS)
    return sorted(actor.class_name for actor in actors.values() if actor.address.node_id == node.binary())
