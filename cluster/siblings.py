"""Front ends of one application tell each other their numbers, as nobody outside can choose among those at one address.

One ``Siblings`` per front end, on its event loop. Whichever front end answers ``/metrics`` shows the numbers of all at
its address, and those at one address, the first in order, the replicas' besides. So whoever scrapes every address has
every number once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)

EXCHANGE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class FrontEndReport:
    """One front end: its ``name``, the ``address`` that it may share, and its ``metrics`` in Prometheus' format.

    Who shares an address with nobody does not write its metrics down.
    """

    name: str
    address: str
    metrics: str = ""


class Siblings:
    """See the module. ``metrics`` writes this front end's numbers, ``exchange`` gives everybody's reports for ours."""

    def __init__(
        self,
        name: str,
        address: str,
        metrics: Callable[[], str],
        exchange: Callable[[FrontEndReport], Awaitable[Sequence[FrontEndReport]]],
    ) -> None:
        self._name = name
        self._address = address
        self._metrics = metrics
        self._exchange = exchange
        self._others: tuple[FrontEndReport, ...] = ()

    async def follow(self) -> None:
        """Exchange reports for ever."""
        while True:
            await self.exchange()
            await asyncio.sleep(EXCHANGE_SECONDS)

    async def exchange(self) -> None:
        """Hand over this front end's report for everybody's. While nobody answers, what was known stays known."""
        own = FrontEndReport(self._name, self._address, self._metrics() if self._neighbours else "")
        try:
            reports = await self._exchange(own)
        except Exception:
            log.exception("the replica directory does not answer")
        else:
            self._others = tuple(report for report in reports if report.name != self._name)

    def metrics(self) -> list[str]:
        """The numbers of every front end at this address."""
        return [self._metrics(), *(other.metrics for other in self._neighbours)]

    @property
    def shows_replicas(self) -> bool:
        """Whether it is here that replicas' numbers are shown."""
        return all(self._address <= other.address for other in self._others)

    @property
    def _neighbours(self) -> list[FrontEndReport]:
        return [other for other in self._others if other.address == self._address]
