"""Every kernel that a CPU has beside its plain PyTorch reference: time of both by turns, and how far results differ.

    python -m benchmarks.kernels [--threads N] [--dtype float32] [--only PATTERN]

Kernels are those that ``kernels.table`` picks for this processor, shapes those of SmolLM2-135M: 9 query and 3 KV heads
of 64, width 576. The reference of attention is ``kernels.attention.gather``, that of products ``F.linear``, that of
copies for transfers one indexing operation per layer, those of small operations ``kernels.pointwise``. Rows named
*SDPA* compare with PyTorch's attention over keys and values that lie side by side already. Times are medians in
microseconds; a difference is the largest from the reference in float32, as a part of the largest number in it. Prints a
table and writes ``bench-results/kernels.json``; ends with 1 if a difference is larger than rounding explains.
"""

import argparse
import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from cluster.bench.report import Environment
from kernels import pointwise, table
from kernels.attention.gather import GatherAttention
from kernels.attention.segments import AttentionBackend, Segment
from kernels.pages import KEY_VALUE, IntArray, PageShape, locate
from kernels.table import Pointwise, TokenCopies

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS = 576, 1536, 49_152, 30
BLOCK = 16
SECONDS_EACH = 0.3
LEAST_REPEATS, MOST_REPEATS = 5, 2000
CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
RESULTS = Path("bench-results/kernels.json")

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation of one size; ``plain`` is what it is compared with, ``exact`` the reference in float32."""

    name: str
    size: str
    fast: Call
    plain: Call
    exact: Call


@dataclass(frozen=True, slots=True)
class Compared:
    """What came of a case; microseconds."""

    name: str
    size: str
    fast: float
    plain: float
    difference: float

    def row(self) -> str:
        """A line of the table."""
        return (
            f"{self.name:24}{self.size:26}{self.fast:>12,.1f}{self.plain:>14,.1f}{self.plain / self.fast:>8.2f}"
            f"{self.difference:>12.1e}"
        )


HEADING = f"{'kernel':24}{'size':26}{'kernel µs':>12}{'reference µs':>14}{'× ref.':>8}{'difference':>12}"


def products(dtype: torch.dtype) -> Iterator[Case]:
    """Products with the weights of a layer and of the head."""
    for outputs, inputs in (
        ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        (2 * INTERMEDIATE, HIDDEN),
        (HIDDEN, INTERMEDIATE),
        (VOCABULARY, HIDDEN),
    ):
        weight = torch.randn(outputs, inputs).to(dtype)
        matrix = table.matrix(weight.clone(), None)
        # Prompts have one row of logits.
        for rows in (1, 8, 32) if outputs == VOCABULARY else (1, 8, 32, 512):
            hidden = torch.randn(rows, inputs).to(dtype)
            yield Case(
                "product",
                f"{rows} × {inputs} → {outputs}",
                partial(matrix, hidden),
                partial(F.linear, hidden, weight),
                partial(F.linear, hidden.float(), weight.float()),
            )


def attention(dtype: torch.dtype) -> Iterator[Case]:
    """Writes of keys and values, and attention: of one token of many sequences, of a prompt, of a part of one."""
    backend = table.attention_backend(CPU, dtype)
    for name, sequences, rows, context in (
        ("decode attention", 1, 1, 256),
        ("decode attention", 8, 1, 256),
        ("decode attention", 32, 1, 256),
        ("decode attention", 1, 1, 2000),
        ("decode attention", 8, 1, 2000),
        ("prompt attention", 1, 512, 512),
        ("prompt attention", 1, 512, 2000),
        ("prompt attention", 1, 2000, 2000),
    ):
        blocks = -(-context // BLOCK)
        order = np.random.default_rng(0).permutation(sequences * blocks).reshape(sequences, blocks)
        segments = [Segment(index * rows, rows, context, table_row) for index, table_row in enumerate(order)]
        cache = torch.randn(sequences * blocks, KEY_VALUE, KV_HEADS, BLOCK, HEAD_DIM).to(dtype)
        query = torch.randn(sequences * rows, HEADS, HEAD_DIM).to(dtype)
        key_value = torch.randn(sequences * rows, KEY_VALUE, KV_HEADS, HEAD_DIM).to(dtype)
        size = f"{sequences} × {rows} of {context}"
        plain = GatherAttention()
        if rows < context:
            written = (_write(one, segments, cache, key_value) for one in (backend, plain, plain))
            yield Case("write", size, *written)
        fast, exact = _attend(backend, segments, query, cache), _attend(plain, segments, query.float(), cache.float())
        yield Case(name, size, fast, _attend(plain, segments, query, cache), exact)
        yield Case(f"{name}, SDPA", size, fast, _attend_without_pages(query, cache, order, rows, context), exact)


def _attend(backend: AttentionBackend, segments: list[Segment], query: torch.Tensor, cache: torch.Tensor) -> Call:
    plan = backend.plan(segments, PageShape.of(cache), None, CPU)
    return partial(backend.attend, query, cache, plan, HEAD_DIM**-0.5)


def _attend_without_pages(query: torch.Tensor, cache: torch.Tensor, order: IntArray, rows: int, context: int) -> Call:
    """PyTorch's attention with grouped queries, over keys and values that somebody has gathered."""
    pages_of = cache[torch.from_numpy(order)].permute(2, 0, 3, 1, 4, 5)
    keys, values = pages_of.reshape(KEY_VALUE, len(order), KV_HEADS, -1, HEAD_DIM)[:, :, :, :context].contiguous()
    mask = torch.ones(rows, context, dtype=torch.bool).tril(context - rows)

    def attend() -> torch.Tensor:
        found = F.scaled_dot_product_attention(
            query.view(len(order), rows, HEADS, HEAD_DIM).transpose(1, 2),
            keys,
            values,
            attn_mask=mask if 1 < rows < context else None,
            is_causal=rows == context,
            enable_gqa=True,
        )
        return found.transpose(1, 2).reshape(-1, HEADS, HEAD_DIM)

    return attend


def _write(backend: AttentionBackend, segments: list[Segment], cache: torch.Tensor, key_value: torch.Tensor) -> Call:
    own = cache.clone()
    plan = backend.plan(segments, PageShape.of(own), None, CPU)

    def write() -> torch.Tensor:
        backend.write(own, key_value, plan)
        return own

    return write


def small_operations(dtype: torch.dtype) -> Iterator[Case]:
    """Norms, rotary positions, activations."""
    chosen = table.pointwise(CPU, dtype)
    for rows in (1, 8, 512):
        hidden, weight = torch.randn(rows, HIDDEN).to(dtype), torch.randn(HIDDEN).to(dtype)
        heads = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)[:, : HEADS + KV_HEADS]
        angles = torch.rand(rows, 1, HEAD_DIM // 2)
        rotary = (heads, angles.cos().to(dtype), angles.sin().to(dtype))
        gate_up = torch.randn(rows, 2 * INTERMEDIATE).to(dtype)
        for name, width, operation, arguments in (
            ("norm", HIDDEN, _norm, (hidden, weight)),
            ("rotary", HEAD_DIM, _rotary, rotary),
            ("rotary, neighbours", HEAD_DIM, _rotary_interleaved, rotary),
            ("silu", INTERMEDIATE, _silu, (gate_up,)),
            ("gelu", INTERMEDIATE, _gelu, (gate_up,)),
        ):
            wide = tuple(tensor.float() for tensor in arguments)
            fast, plain = (partial(operation, one, *_copied(arguments)) for one in (chosen, pointwise))
            yield Case(name, f"{rows} × {width}", fast, plain, partial(operation, pointwise, *wide))


def _copied(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """For operations in place: of the same strides."""
    return tuple(torch.empty_strided(t.size(), t.stride(), dtype=t.dtype).copy_(t) for t in tensors)


def _norm(kernels: Pointwise, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return kernels.rms_norm(hidden, weight, 1e-5)


def _rotary(kernels: Pointwise, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """In place, so the same heads turn again and again; their lengths stay."""
    kernels.apply_rotary(heads, cos, sin)
    return heads


def _rotary_interleaved(kernels: Pointwise, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    kernels.apply_rotary_interleaved(heads, cos, sin)
    return heads


def _silu(kernels: Pointwise, gate_up: torch.Tensor) -> torch.Tensor:
    return kernels.silu_and_multiply(gate_up)


def _gelu(kernels: Pointwise, gate_up: torch.Tensor) -> torch.Tensor:
    return kernels.gelu_and_multiply(gate_up)


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens of some layers, in pages whose blocks lie in no order, and ``values`` to store there."""

    caches: list[torch.Tensor]
    blocks: IntArray
    begin: int
    end: int
    values: torch.Tensor

    @classmethod
    def of(cls, layers: int, tokens: int, dtype: torch.dtype) -> "TokenRange":
        """Random numbers, the same again and again; the first and last block are not whole."""
        torch.manual_seed(0)
        blocks = np.random.default_rng(0).permutation(tokens // BLOCK + 1)
        caches = [torch.randn(len(blocks), KEY_VALUE, KV_HEADS, BLOCK, HEAD_DIM).to(dtype) for _ in range(layers)]
        values = torch.randn(layers, KEY_VALUE, KV_HEADS, tokens, HEAD_DIM).to(dtype)
        return cls(caches, blocks, 5, 5 + tokens, values)

    def gather(self, kernels: TokenCopies) -> torch.Tensor:
        """Out of the pages."""
        kernels.gather_tokens(self.caches, self.blocks, self.begin, self.end, list(self.values))
        return self.values

    def scatter(self, kernels: TokenCopies) -> torch.Tensor:
        """Into the pages; returns the last layer's."""
        kernels.scatter_tokens(self.caches, self.blocks, self.begin, self.end, list(self.values))
        return self.caches[-1]

    def gather_by_index(self) -> torch.Tensor:
        """The reference."""
        at = [torch.from_numpy(one) for one in locate(self.blocks, self.begin, self.end, BLOCK)]
        for cache, values in zip(self.caches, self.values, strict=True):
            values.copy_(cache.permute(0, 3, 1, 2, 4)[at[0], at[1]].permute(1, 2, 0, 3))
        return self.values

    def scatter_by_index(self) -> torch.Tensor:
        """The reference."""
        blocks, offsets = (torch.from_numpy(one) for one in locate(self.blocks, self.begin, self.end, BLOCK))
        for cache, values in zip(self.caches, self.values, strict=True):
            cache.permute(0, 3, 1, 2, 4).index_put_((blocks, offsets), values.permute(2, 0, 1, 3))
        return self.caches[-1]


def copies(dtype: torch.dtype) -> Iterator[Case]:
    """Tokens of all layers, or of one, out of their pages and into them, as transfers do it."""
    chosen = table.token_copies(CPU)
    for layers, tokens in ((1, 512), (LAYERS, 64), (LAYERS, 512)):
        fast, plain, exact = (TokenRange.of(layers, tokens, dtype) for _ in range(3))
        size = f"{layers} layers, {tokens} tokens"
        yield Case("gather", size, partial(fast.gather, chosen), plain.gather_by_index, exact.gather_by_index)
        fast, plain, exact = (TokenRange.of(layers, tokens, dtype) for _ in range(3))
        yield Case("scatter", size, partial(fast.scatter, chosen), plain.scatter_by_index, exact.scatter_by_index)


def compare(case: Case) -> Compared:
    """Results first, then both in turns."""
    exact = case.exact().float()
    difference = ((case.fast().float() - exact).abs().max() / exact.abs().max()).item()
    begin = time.perf_counter()
    case.plain()
    once = time.perf_counter() - begin
    repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(SECONDS_EACH / once)))
    times: dict[Call, list[float]] = {case.fast: [], case.plain: []}
    for _ in range(repeats):
        for call, found in times.items():
            begin = time.perf_counter()
            call()
            found.append(1e6 * (time.perf_counter() - begin))
    fast, plain = (statistics.median(found) for found in times.values())
    return Compared(case.name, case.size, fast, plain, difference)


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=[str(dtype).split(".")[1] for dtype in TOLERANCES])
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression for kernels' names")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    compiled = "compiled kernels" if table.has_compiled_kernels(CPU, dtype) else "no compiled kernels"
    print(f"{arguments.dtype}, {arguments.threads} threads, {compiled}")
    print(HEADING)
    found: list[Compared] = []
    with torch.inference_mode():
        for family in (products, attention, small_operations, copies):
            for case in family(dtype):
                if re.search(arguments.only, case.name):
                    found.append(compare(case))
                    print(found[-1].row(), flush=True)
    command = shlex.join(["python", "-m", "benchmarks.kernels", *sys.argv[1:]])
    RESULTS.parent.mkdir(exist_ok=True)
    written = {"environment": asdict(Environment.here(command, "")), "kernels": [asdict(one) for one in found]}
    RESULTS.write_text(json.dumps(written, indent=2) + "\n")
    wrong = [one for one in found if not one.difference <= TOLERANCES[dtype]]
    for one in wrong:
        print(f"{one.name}, {one.size}: differs by {one.difference:.1e}, more than {TOLERANCES[dtype]:.0e}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
