"""What the processes of a running local cluster hold: memory and descriptors, of engines and front ends alone."""

from dataclasses import dataclass

import psutil

_PARTS = {"ray::ReplicaActor": "engine", "ray::ServeReplica:crosskv:front-end": "front end"}


@dataclass(frozen=True, slots=True)
class Footprint:
    """One process. ``part`` is what it is for."""

    pid: int
    part: str
    resident_bytes: int
    descriptors: int


def footprints() -> dict[int, Footprint]:
    """Of every engine and front end below this process."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            part = next((part for start, part in _PARTS.items() if title.startswith(start)), None)
            if part is not None:
                found[process.pid] = Footprint(process.pid, part, process.memory_info().rss, process.num_fds())
        except psutil.NoSuchProcess:
            continue
    return found


def growth(before: dict[int, Footprint], after: dict[int, Footprint]) -> dict[str, tuple[float, int]]:
    """Of each process: growth of its memory as a fraction, and of its number of descriptors.

    Raises ``RuntimeError`` if a process was replaced: what it held went with it.
    """
    if before.keys() != after.keys():
        raise RuntimeError(f"processes {sorted(before)} have become {sorted(after)}: one has died")
    return {
        f"{then.part} {pid}": (
            after[pid].resident_bytes / then.resident_bytes - 1,
            after[pid].descriptors - then.descriptors,
        )
        for pid, then in before.items()
    }
