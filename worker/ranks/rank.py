"""One rank of a replica: its part of the model, its pages, and its side of every transfer.

Made when the model is loaded, driven by commands on its engine's thread until the process ends. The leading rank
carries out the same commands as those that follow it.
"""

import torch

from worker.incoming_transfers import IncomingTransfers
from worker.model_runner import ModelRunner
from worker.outgoing_transfers import OutgoingTransfers
from worker.ranks.commands import (
    ClearBlocks,
    CloseIncoming,
    CloseOutgoing,
    Command,
    Compute,
    CopyBlocks,
    OpenIncoming,
    OpenOutgoing,
    SendComputed,
)


class Rank:
    """See the module. ``outgoing`` is a prefill rank's, ``incoming`` a decode rank's."""

    def __init__(
        self,
        runner: ModelRunner,
        outgoing: OutgoingTransfers | None = None,
        incoming: IncomingTransfers | None = None,
    ) -> None:
        self.runner = runner
        self.outgoing = outgoing
        self.incoming = incoming

    def apply(self, command: Command) -> torch.Tensor | None:
        """Carry out a command; of a step's, return the logits if this rank leads and any were wanted."""
        match command:
            case Compute():
                if self.outgoing is not None:
                    return self.runner.execute(command.rows, self.outgoing.while_computing(command.rows))
                return self.runner.execute(command.rows)
            case ClearBlocks():
                self.runner.clear_blocks(command.blocks)
            case CopyBlocks():
                self.runner.copy_blocks(command.copies)
            case OpenOutgoing() | SendComputed() | CloseOutgoing():
                self._send(command)
            case OpenIncoming() | CloseIncoming():
                self._receive(command)
            case _:
                raise AssertionError(f"{command} is for the connections, not for the rank")
        return None

    def _send(self, command: OpenOutgoing | SendComputed | CloseOutgoing) -> None:
        assert self.outgoing is not None, "only a prefill rank sends"
        match command:
            case OpenOutgoing():
                self.outgoing.open(command)
            case SendComputed():
                self.outgoing.send(command)
            case CloseOutgoing():
                self.outgoing.close(command)

    def _receive(self, command: OpenIncoming | CloseIncoming) -> None:
        assert self.incoming is not None, "only a decode rank receives"
        match command:
            case OpenIncoming():
                self.incoming.open(command)
            case CloseIncoming():
                self.incoming.close(command)
