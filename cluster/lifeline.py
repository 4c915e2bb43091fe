"""Ends an application with the command that started it, on a Ray cluster that the command only joined.

Serve's replicas outlive whoever deployed them. So the command makes two actors: a ``Holder``, which Ray ends with the
command however that dies, and a detached ``Watcher``, which waits for this end and then stops what is left. A command
that ends by itself stops everything first and lets go of both.
"""

import threading

import ray
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.directory import ON_HEAD, stop_directory
from cluster.errors import CrosskvError

_NAME = "crosskv-lifeline"


class AlreadyServed(CrosskvError):
    """Another command's application runs on the Ray cluster."""


class Holder:
    """Belongs to the command."""

    def wait(self) -> None:
        """Return never: only the end of this actor ends the call."""
        threading.Event().wait()


class Watcher:
    """Belongs to nobody; ends itself when it is done."""

    def __init__(self, application: str) -> None:
        self._application = application

    def watch(self, holder: "ray.actor.ActorHandle") -> None:
        """Begin to wait for the holder's end."""
        threading.Thread(target=self._stop_after, args=(holder,), daemon=True).start()

    def _stop_after(self, holder: "ray.actor.ActorHandle") -> None:
        try:
            ray.get(holder.wait.remote())
        except ray.exceptions.RayActorError:
            stop_application(self._application)
        ray.kill(ray.get_runtime_context().current_actor)


class Lifeline:
    """Ties ``application`` to this process; raises ``AlreadyServed`` while another process holds it."""

    def __init__(self, application: str) -> None:
        try:
            self._watcher = (
                ray.remote(Watcher)
                .options(name=_NAME, namespace=application, lifetime="detached", num_cpus=0, resources=ON_HEAD)
                .remote(application)
            )
        except ValueError:
            raise AlreadyServed(
                "another command serves on this Ray cluster, or is being stopped; stop it first, or use another cluster"
            ) from None
        # Elsewhere it would end with a node that nothing here depends on.
        beside = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._holder = ray.remote(Holder).options(num_cpus=0, scheduling_strategy=beside).remote()
        ray.get(self._watcher.watch.remote(self._holder))

    def let_go(self) -> None:
        """Everything has been stopped."""
        ray.kill(self._watcher)
        ray.kill(self._holder)


def stop_application(application: str) -> None:
    """Stop an application and its directory, and Serve itself unless it has other applications."""
    serve.delete(application)
    stop_directory(application)
    if not serve.status().applications:
        serve.shutdown()
