"""What a GGUF file says about rope scaling, as Hugging Face's ``rope_scaling``."""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from worker.checkpoint.checkpoint_error import CheckpointError
from worker.checkpoint.gguf_metadata import GgufMetadata

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that holds one divisor for each rotary frequency; how llama3 scaling is stored."""

Floats = npt.NDArray[np.float64]

# The context length for which Llama 3 was trained before it was scaled.
_ORIGINAL = 8192

# The rounding of float32, in which the divisors are stored, with room for the arithmetic that made them.
_TOLERANCE = 1e-5


def rope_scaling(
    metadata: GgufMetadata, theta: float, head_dim: int, factors: Floats | None
) -> dict[str, object] | None:
    """The checkpoint's ``rope_scaling``, None for plain rope.

    ``factors`` is the content of ``rope_freqs.weight``, if the file has it. Raises ``CheckpointError`` for scaling
    that cannot be expressed.
    """
    # Files from before the type was stored have only a factor; it meant linear scaling.
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    kind = metadata.text("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if factors is not None:
        if kind != "none":
            raise CheckpointError(f"{metadata.path}: both {ROPE_FACTORS} and rope.scaling.type = {kind} are given")
        return _from_factors(metadata, theta, head_dim, factors)
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": factor}
        case "yarn":
            return _yarn(metadata, factor)
    raise CheckpointError(
        f"{metadata.path}: rope scaling of type {kind!r} is not supported; none, linear, yarn and llama3 are"
    )


def llama3_divisors(theta: float, head_dim: int, factor: float, low: float, high: float, original: float) -> Floats:
    """What llama3 scaling divides each of the ``head_dim / 2`` rotary frequencies by.

    Wavelengths above ``original / low`` are divided by ``factor``, those below ``original / high`` by 1, and between
    the two the frequency is interpolated linearly in ``original / wavelength`` (Llama 3.1's model card).
    """
    weight = (original / _wavelengths(theta, head_dim) - low) / (high - low)
    weight = np.clip(weight, 0.0, 1.0)
    return 1.0 / ((1.0 - weight) / factor + weight)


def _from_factors(metadata: GgufMetadata, theta: float, head_dim: int, factors: Floats) -> dict[str, object] | None:
    """The llama3 parameters that produce these divisors: of released models the published ones, otherwise equivalent.

    ``low``, ``high`` and ``original`` enter the formula only by their ratios, so that any ``original`` will do.
    """
    if factors.shape != (head_dim // 2,) or not np.isfinite(factors).all() or (factors < 1.0 - _TOLERANCE).any():
        raise CheckpointError(
            f"{metadata.path}: {ROPE_FACTORS} must hold {head_dim // 2} divisors of at least 1, one for each frequency"
        )
    factor = _tidy(float(factors.max()))
    if factor == 1.0:
        return None
    if np.allclose(factors, factor, rtol=_TOLERANCE):
        return {"rope_type": "linear", "factor": factor}
    for low, high in _low_and_high(theta, head_dim, factor, factors):
        if np.allclose(llama3_divisors(theta, head_dim, factor, low, high, _ORIGINAL), factors, rtol=_TOLERANCE):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": _ORIGINAL,
            }
    raise CheckpointError(f"{metadata.path}: {ROPE_FACTORS} holds divisors that no llama3 rope scaling produces")


def _low_and_high(theta: float, head_dim: int, factor: float, factors: Floats) -> Iterator[tuple[float, float]]:
    """Pairs of ``low`` and ``high`` that may explain the divisors, for ``original`` = ``_ORIGINAL``."""
    yield 1.0, 4.0  # every released Llama 3
    between = (factors > 1.0 + _TOLERANCE) & (factors < factor * (1.0 - _TOLERANCE))
    weight = (1.0 / factors[between] - 1.0 / factor) / (1.0 - 1.0 / factor)
    turns = _ORIGINAL / _wavelengths(theta, head_dim)[between]
    if len(weight) == 1:  # one point lets one of the two be chosen
        for ratio in (4.0, 2.0, 8.0):
            low = float(turns[0] / (1.0 + weight[0] * (ratio - 1.0)))
            yield low, ratio * low
    elif len(weight) > 1:  # the interpolation is a line: weight = (turns - low) / (high - low)
        slope, intercept = map(float, np.polyfit(turns, weight, 1))
        if slope > 0 > intercept:
            yield _tidy(-intercept / slope), _tidy((1.0 - intercept) / slope)


def _yarn(metadata: GgufMetadata, factor: float) -> dict[str, object]:
    scaling: dict[str, object] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.size(
            "rope.scaling.original_context_length", metadata.size("context_length")
        ),
    }
    for theirs, ours in (
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if metadata.has(f"rope.scaling.{theirs}"):
            scaling[ours] = metadata.number(f"rope.scaling.{theirs}")
    return scaling


def _wavelengths(theta: float, head_dim: int) -> Floats:
    """Tokens per turn of each rotary frequency."""
    return 2.0 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _tidy(value: float) -> float:
    """Undo the noise of float32: 7.9999995 was 8."""
    rounded = round(value, 3)
    return rounded if abs(rounded - value) <= _TOLERANCE * value else value
