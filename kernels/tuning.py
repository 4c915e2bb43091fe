"""How Triton kernels are cut into programs, as data. Every figure is an unmeasured default: it compiles without spills.

Measured tables take the place of these; nothing else needs to change then.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a table depends on: compute capability, such as 80 or 90, and the number of multiprocessors."""

    architecture: int
    multiprocessors: int

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        """A CUDA device's; for the interpreter on the CPU, that of an A100."""
        if device.type != "cuda":
            return A100
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.major * 10 + properties.minor, properties.multi_processor_count)


A100: Final = Gpu(80, 108)
H100: Final = Gpu(90, 132)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Query rows (of all heads of a group) and tokens of one step of a program; its warps and pipeline stages."""

    rows: int
    tokens: int
    warps: int
    stages: int


AttentionTable = Mapping[tuple[int, int, int], AttentionTile]
"""By architecture, bytes of an element, and the wider of key and value, rounded up to a power of two."""

# Unmeasured defaults.
DECODE_TILES: Final[AttentionTable] = MappingProxyType(
    {
        (80, 2, 64): AttentionTile(16, 64, 4, 3),
        (80, 2, 128): AttentionTile(16, 64, 4, 3),
        (80, 2, 256): AttentionTile(16, 32, 4, 3),
        (80, 2, 512): AttentionTile(16, 32, 8, 2),
        (80, 4, 64): AttentionTile(16, 32, 4, 2),
        (80, 4, 128): AttentionTile(16, 32, 4, 2),
        (80, 4, 256): AttentionTile(16, 16, 4, 2),
        (80, 4, 512): AttentionTile(16, 16, 8, 2),
        (90, 2, 64): AttentionTile(16, 64, 4, 3),
        (90, 2, 128): AttentionTile(16, 64, 4, 3),
        (90, 2, 256): AttentionTile(16, 64, 4, 3),
        (90, 2, 512): AttentionTile(16, 32, 8, 3),
        (90, 4, 64): AttentionTile(16, 32, 4, 2),
        (90, 4, 128): AttentionTile(16, 16, 4, 2),
        (90, 4, 256): AttentionTile(16, 16, 4, 2),
        (90, 4, 512): AttentionTile(16, 16, 8, 2),
    }
)
"""One row per sequence. ``rows`` is the least that a matrix product takes."""

# Unmeasured defaults.
CHUNK_TILES: Final[AttentionTable] = MappingProxyType(
    {
        (80, 2, 64): AttentionTile(128, 64, 8, 3),
        (80, 2, 128): AttentionTile(64, 64, 8, 2),
        (80, 2, 256): AttentionTile(64, 32, 8, 2),
        (80, 2, 512): AttentionTile(32, 32, 8, 2),
        (80, 4, 64): AttentionTile(32, 32, 4, 2),
        (80, 4, 128): AttentionTile(32, 32, 8, 2),
        (80, 4, 256): AttentionTile(16, 16, 8, 2),
        (80, 4, 512): AttentionTile(16, 16, 8, 2),
        (90, 2, 64): AttentionTile(128, 64, 8, 3),
        (90, 2, 128): AttentionTile(64, 64, 8, 3),
        (90, 2, 256): AttentionTile(64, 32, 8, 2),
        (90, 2, 512): AttentionTile(32, 32, 8, 2),
        (90, 4, 64): AttentionTile(32, 32, 4, 2),
        (90, 4, 128): AttentionTile(32, 32, 8, 2),
        (90, 4, 256): AttentionTile(16, 16, 8, 2),
        (90, 4, 512): AttentionTile(16, 16, 8, 2),
    }
)
"""Several rows per sequence."""

# Unmeasured defaults.
LATENT_TILES: Final[AttentionTable] = MappingProxyType(
    {
        (80, 2, 512): AttentionTile(16, 32, 4, 2),
        (80, 4, 512): AttentionTile(16, 16, 8, 1),
        (90, 2, 512): AttentionTile(16, 32, 4, 2),
        (90, 4, 512): AttentionTile(16, 16, 8, 1),
    }
)
"""``rows`` are heads; the width is that of the latent without its rotary part."""

PROGRAMS_PER_MULTIPROCESSOR: Final = 2
"""Contexts are split until there are so many programs. An unmeasured default."""

LEAST_TILES_PER_SPLIT: Final = 4
"""A split has at least so many steps, so that joining splits stays cheap. An unmeasured default."""


def attention_tile(table: AttentionTable, architecture: int, element_size: int, width: int) -> AttentionTile:
    """The entry for ``width`` or the next wider, of this architecture or the newest that is older.

    Raises ``ValueError`` if the width is beyond the table, or the architecture before it.
    """
    fitting = [
        (-known, wide)
        for known, size, wide in table
        if known <= architecture and size == element_size and wide >= width
    ]
    if not fitting:
        raise ValueError(
            f"no attention tile for compute capability {architecture}, elements of {element_size} bytes, width {width}"
        )
    known, wide = min(fitting)
    return table[-known, element_size, wide]


def split_sizes(gpu: Gpu, programs: int, most_tiles: int) -> tuple[int, int]:
    """Into how many splits a context of ``most_tiles`` steps is cut, and how many steps each has.

    ``programs`` is how many there would be without splits. All contexts of a launch are cut alike, so that every
    program has the same work; shorter contexts have fewer splits (Flash-Decoding, Dao et al. 2023).
    """
    wanted = max(1, PROGRAMS_PER_MULTIPROCESSOR * gpu.multiprocessors // max(1, programs))
    per_split = max(LEAST_TILES_PER_SPLIT, -(-most_tiles // wanted))
    return -(-most_tiles // per_split), per_split


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Rows of one expert, outputs and inputs of its matrix that a program multiplies in one step; warps and stages."""

    rows: int
    outer: int
    inner: int
    warps: int
    stages: int


ExpertTable = Mapping[tuple[int, int, int], ExpertTile]
"""By architecture, bytes of an element, and the rows that an expert has on average, at most."""

# Unmeasured defaults.
EXPERT_TILES: Final[ExpertTable] = MappingProxyType(
    {
        (80, 2, 16): ExpertTile(16, 64, 128, 4, 3),
        (80, 2, 64): ExpertTile(64, 64, 64, 4, 3),
        (80, 2, 1 << 31): ExpertTile(128, 128, 32, 8, 3),
        (80, 4, 16): ExpertTile(16, 32, 32, 4, 3),
        (80, 4, 1 << 31): ExpertTile(32, 64, 32, 8, 2),
        (90, 2, 16): ExpertTile(16, 64, 128, 4, 4),
        (90, 2, 64): ExpertTile(64, 128, 64, 4, 4),
        (90, 2, 1 << 31): ExpertTile(128, 128, 64, 8, 4),
        (90, 4, 16): ExpertTile(16, 32, 32, 4, 3),
        (90, 4, 1 << 31): ExpertTile(32, 64, 32, 8, 2),
    }
)
"""Few rows wait for the matrices, many for the multipliers."""


def expert_tile(table: ExpertTable, architecture: int, element_size: int, rows: int) -> ExpertTile:
    """The entry for ``rows`` of each expert or the next more, of this architecture or the newest that is older.

    Raises ``ValueError`` if there is none.
    """
    fitting = [
        (-known, most) for known, size, most in table if known <= architecture and size == element_size and most >= rows
    ]
    if not fitting:
        raise ValueError(
            f"no expert tile for compute capability {architecture}, elements of {element_size} bytes, {rows} rows"
        )
    known, most = min(fitting)
    return table[-known, element_size, most]


@dataclass(frozen=True, slots=True)
class DeltaTile:
    """How the delta rule's states are cut.

    ``row_values`` columns and ``row_warps`` for single rows. For consecutive ones, blocks of ``rows``, 16, 32 or 64;
    ``keys`` rows and ``values`` columns of a state, and ``warps``.
    """

    row_values: int
    row_warps: int
    rows: int
    keys: int
    values: int
    warps: int


DeltaTable = Mapping[int, DeltaTile]
"""By architecture."""

# Unmeasured defaults.
DELTA_TILES: Final[DeltaTable] = MappingProxyType(
    {
        80: DeltaTile(32, 4, 32, 16, 32, 4),
        90: DeltaTile(32, 4, 32, 16, 32, 4),
    }
)
"""For keys and values of 128 numbers, which all released models have."""


def delta_tile(table: DeltaTable, architecture: int) -> DeltaTile:
    """The entry of this architecture or the newest that is older. Raises ``ValueError`` if there is none."""
    known = [known for known in table if known <= architecture]
    if not known:
        raise ValueError(f"no tile of the delta rule for compute capability {architecture}")
    return table[max(known)]


@dataclass(frozen=True, slots=True)
class IndexTile:
    """Rows and tokens that a program of an indexer scores, all heads of a row at once; its warps and stages."""

    rows: int
    tokens: int
    warps: int
    stages: int


IndexTable = Mapping[tuple[int, int], IndexTile]
"""By architecture and bytes of an element."""

# Unmeasured defaults.
INDEX_TILES: Final[IndexTable] = MappingProxyType(
    {
        (80, 2): IndexTile(8, 64, 4, 2),
        (80, 4): IndexTile(8, 16, 8, 1),
        (90, 2): IndexTile(8, 64, 4, 2),
        (90, 4): IndexTile(8, 16, 8, 1),
    }
)
"""For 64 heads of 128 numbers, which released models have."""


def index_tile(table: IndexTable, architecture: int, element_size: int) -> IndexTile:
    """The entry of this architecture or the newest that is older. Raises ``ValueError`` if there is none."""
    known = [known for known, size in table if known <= architecture and size == element_size]
    if not known:
        raise ValueError(f"no index tile for compute capability {architecture}, elements of {element_size} bytes")
    return table[max(known), element_size]


ELEMENTS_PER_PROGRAM: Final = 2048
"""Of pointwise kernels. An unmeasured default."""


def warps_for(elements: int) -> int:
    """Warps of a pointwise program: 16 elements a thread, an unmeasured default."""
    return max(1, min(16, elements // (16 * 32)))


VOCABULARY_TILE: Final = 2048
"""Tokens of a row that a draw looks at in one step. An unmeasured default."""

VOCABULARY_WARPS: Final = 8
"""Of a program that draws. An unmeasured default."""
