"""A model in this process: its runner and hand-made block tables, without scheduler, engine or sockets.

For tests of what a model computes. Prompts run side by side, in chunks; every block is taken in order and none is given
back, but a block that no later row may see is struck from its table, so that a read of it would fail. What a model puts
before every prompt is added here, and its logits are cut away.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from worker.config import EngineConfig, Role
from worker.dtype import DTYPES
from worker.kv_cache.block_pool import BlockId
from worker.kv_cache.block_table import NO_BLOCK, BlockTable
from worker.kv_cache.group_blocks import BlockCopy
from worker.kv_cache.specs import LastState, LastTokens
from worker.model_runner import ModelRunner
from worker.ranks.rank_group import SOLO, RankGroup
from worker.sampling_params import SamplingParams
from worker.scheduler import ScheduledRows
from worker.sequence import RequestId
from worker.sequence import Sequence as EngineSequence

SENTINEL = 0x7A
"""Every byte of fresh KV memory: large and finite in float64, float32 and bfloat16."""


class ModelHarness:
    """A checkpoint, a directory or a GGUF file, loaded in ``dtype``."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        dtype: str = "float32",
        block_size: int = 16,
        kv_sharing: str = "model",
        role: Role = Role.COLOCATED,
        memory: int = 64 << 20,
        ranks: RankGroup = SOLO,
        decode_graphs: bool = True,
    ) -> None:
        torch.set_num_threads(1)
        config = EngineConfig(
            model=str(checkpoint),
            role=role,
            dtype=dtype,
            block_size=block_size,
            kv_sharing=kv_sharing,
            kv_cache_memory=memory,
            decode_graphs=decode_graphs,
        )
        self.dtype = DTYPES[dtype]
        self.runner = ModelRunner(config, ranks, fill=SENTINEL)
        self._leads = ranks.rank == 0
        self.prefix = self.runner.prefix_tokens
        self._next = 0

    def sequence(self, tokens: Sequence[int], room: int) -> EngineSequence:
        """A sequence that may grow to ``room`` tokens after the model's prefix; nothing of it is computed."""
        sequence = EngineSequence(
            request_id=RequestId(f"request-{self._next}"),
            choice=0,
            tokens=[*self.prefix, *tokens],
            prompt_len=len(self.prefix) + len(tokens),
            sampling=SamplingParams(),
            salt="",
            arrival=0.0,
            deadline=1e9,
        )
        for group in self.runner.cache.groups:
            if isinstance(group.retention, LastState):
                sequence.tables.append(BlockTable([NO_BLOCK, *self._take(1)]))
            else:
                sequence.tables.append(BlockTable(self._take(-(-(len(self.prefix) + room) // group.block_size))))
        return sequence

    def fork(self, sequence: EngineSequence, tokens: Sequence[int]) -> EngineSequence:
        """A sequence with everything that is computed of another, which goes on with ``tokens``."""
        own = [*sequence.tokens[len(self.prefix) : sequence.computed], *tokens]
        forked = self.sequence(own, len(own))
        forked.computed = sequence.computed
        for source, destination in zip(sequence.tables, forked.tables, strict=True):
            # Of a state, only the block that was written; the fork reads its copy next.
            pairs = zip(reversed(source.blocks), reversed(destination.blocks), strict=True)
            copies = [BlockCopy(*pair) for pair in pairs if NO_BLOCK not in pair]
            self.runner.copy_blocks(copies)
        self._strike(forked)
        return forked

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[EngineSequence, int]], *, all_logits: bool = True) -> list[torch.Tensor]:
        """Compute that many further tokens of each; their logits, or those of the last row, each ``[n, vocab]``.

        A rank that does not lead has none.
        """
        scheduled = [ScheduledRows(s, s.computed, count, count if all_logits else 1) for s, count in rows]
        logits = self.runner.execute([rows.contents for rows in scheduled])
        for sequence, count in rows:
            sequence.computed += count
            self._strike(sequence)
        if logits is None:
            assert not self._leads
            return []
        return list(logits.split([s.logit_rows for s in scheduled]))

    def prompt_logits(self, prompts: Sequence[Sequence[int]], chunk: int) -> list[torch.Tensor]:
        """Logits of every token of every prompt, ``[tokens, vocab]`` each; all prompts run side by side."""
        sequences = [self.sequence(prompt, len(prompt)) for prompt in prompts]
        collected: list[list[torch.Tensor]] = [[] for _ in prompts]
        while any(sequence.pending for sequence in sequences):
            live = [index for index, sequence in enumerate(sequences) if sequence.pending]
            parts = self.step([(sequences[i], min(chunk, sequences[i].pending)) for i in live])
            for index, part in zip(live, parts, strict=True):
                collected[index].append(part)
        return [torch.cat(parts)[len(self.prefix) :] for parts in collected]

    @torch.inference_mode()
    def store(self, prompts: Sequence[Sequence[int]], chunk: int) -> list[EngineSequence]:
        """Sequences of the prompts, computed without logits."""
        sequences = [self.sequence(prompt, len(prompt)) for prompt in prompts]
        while any(sequence.pending for sequence in sequences):
            live = [sequence for sequence in sequences if sequence.pending]
            scheduled = [ScheduledRows(s, s.computed, min(chunk, s.pending), 0) for s in live]
            assert self.runner.execute([rows.contents for rows in scheduled]) is None
            for rows in scheduled:
                rows.sequence.computed += rows.rows
                self._strike(rows.sequence)
        return sequences

    def stored(self, prompts: Sequence[Sequence[int]], chunk: int) -> list[torch.Tensor]:
        """All KV memory after the prompts, computed without logits, as ``dtype``, one flat tensor per buffer."""
        self.store(prompts, chunk)
        return [raw.view(self.dtype) for raw in self.runner.buffers.values()]

    def greedy(self, prompts: Sequence[Sequence[int]], count: int, chunk: int) -> list[list[int]]:
        """``count`` greedy tokens after every prompt; only the rows that are sampled from get logits."""
        sequences = [self.sequence(prompt, len(prompt) + count) for prompt in prompts]
        while any(len(s.tokens) < s.prompt_len + count for s in sequences):
            live = [s for s in sequences if len(s.tokens) < s.prompt_len + count]
            parts = self.step([(s, min(chunk, s.pending)) for s in live], all_logits=False)
            for sequence, part in zip(live, parts, strict=True):
                if not sequence.pending:
                    sequence.tokens.append(int(part[-1].argmax()))
        return [s.tokens[s.prompt_len :] for s in sequences]

    def _take(self, count: int) -> list[BlockId]:
        taken = range(self._next, self._next + count)
        self._next += count
        assert self._next <= self.runner.num_blocks, f"{self._next} blocks taken of {self.runner.num_blocks}"
        return [BlockId(block) for block in taken]

    def _strike(self, sequence: EngineSequence) -> None:
        for group, table in zip(self.runner.cache.groups, sequence.tables, strict=True):
            match group.retention:
                case LastState():
                    table.blocks[0] = table.blocks[1]
                case LastTokens(window, sinks):
                    dead = max(0, sequence.computed - window + 1) // group.block_size
                    for entry in range(-(-sinks // group.block_size), dead):
                        table.blocks[entry] = NO_BLOCK
