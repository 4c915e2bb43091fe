"""What a configuration must satisfy before a model is built from it: sizes that make sense, settings that are computed.

Every architecture names its own check in the registry; these are the parts that checks are made of. They read fields
that the architecture's configuration class always has, unless they say otherwise.
"""

import math
from collections.abc import Sequence
from typing import cast

from worker.text_config import TextConfig

MAX_SIZE = (1 << 31) - 1
MAX_HEAD_DIM = 4096

SLIDING, FULL = "sliding_attention", "full_attention"
"""Entries of ``layer_types``."""


class UnsupportedModel(ValueError):
    """A model, or a setting of it, that cannot be computed faithfully."""


def require_sizes(config: TextConfig, *fields: str) -> None:
    """Raise unless every field is a whole number from 1 to 2³¹ − 1."""
    for field in fields:
        value = getattr(config, field)
        if not (type(value) is int and 0 < value <= MAX_SIZE):
            raise UnsupportedModel(f"config.json: {field} is {value!r}, not a whole number from 1 to {MAX_SIZE}")


def require_positive(field: str, value: object) -> None:
    """Raise unless a setting is a positive finite number."""
    if not (type(value) in (int, float) and 0 < cast("float", value) < math.inf):
        raise UnsupportedModel(f"config.json: {field} is {value!r}, not a positive finite number")


def require_head_dim(field: str, value: object) -> None:
    """Raise unless a head's size is a positive even number."""
    if not (type(value) is int and 0 < value <= MAX_HEAD_DIM and value % 2 == 0):
        raise UnsupportedModel(f"config.json: {field} is {value!r}, not an even number from 2 to {MAX_HEAD_DIM}")


def require_setting(config: TextConfig, field: str, *supported: object) -> None:
    """Raise unless a field has one of the values that are computed."""
    value = getattr(config, field)
    if value not in supported:
        names = ", ".join(repr(choice) for choice in supported)
        raise UnsupportedModel(f"config.json: {field} is {value!r}; supported: {names}")


def require_setting_if_given(config: TextConfig, field: str, *supported: object) -> None:
    """The same for a field that the configuration class does not know, but a checkpoint's configuration may have."""
    if hasattr(config, field):
        require_setting(config, field, *supported)


def require_at_most(config: TextConfig, part: str, whole: str) -> None:
    """Raise if field ``part`` is more than field ``whole``."""
    if getattr(config, part) > getattr(config, whole):
        raise UnsupportedModel(
            f"config.json: {part} {getattr(config, part)} is more than {whole} {getattr(config, whole)}"
        )


def require_entries(config: TextConfig, field: str, supported: Sequence[object]) -> None:
    """Raise unless a field has an entry for every layer, and each is one of those that are computed."""
    entries, layers = getattr(config, field), config.num_hidden_layers
    if len(entries) != layers:
        raise UnsupportedModel(
            f"config.json: {field} has {len(entries)} entries for {layers} layers (num_hidden_layers)"
        )
    for index, entry in enumerate(entries):
        if entry not in supported:
            names = ", ".join(map(repr, supported))
            raise UnsupportedModel(f"config.json: {field}[{index}] is {entry!r}; supported: {names}")


def require_multiple(config: TextConfig, whole: str, part: str) -> None:
    """Raise unless field ``whole`` is a multiple of field ``part``."""
    if getattr(config, whole) % getattr(config, part):
        raise UnsupportedModel(
            f"config.json: {whole} {getattr(config, whole)} is not a multiple of {part} {getattr(config, part)}"
        )


def require_rope_type(config: TextConfig, *supported: str) -> None:
    """Raise unless the rope is of a type that is computed."""
    kind = config.rope_parameters["rope_type"]
    if kind not in supported:
        raise UnsupportedModel(f"config.json: rope_type is {kind!r}; supported: {', '.join(map(repr, supported))}")


def require_rope(config: TextConfig, head_dim: int) -> None:
    """Raise for a rope whose numbers make no sense for heads of ``head_dim``, of which it may turn a part."""
    parameters = config.rope_parameters
    require_positive("rope_theta", parameters.get("rope_theta"))
    factor = parameters.get("factor", 1.0)
    if not (isinstance(factor, int | float) and 1.0 <= factor < math.inf):
        raise UnsupportedModel(f"config.json: the rope scaling factor is {factor!r}, not a number of at least 1")
    share = parameters.get("partial_rotary_factor", 1.0)
    require_positive("partial_rotary_factor", share)
    turned = int(head_dim * share)
    if not 0 < turned <= head_dim or turned % 2:
        raise UnsupportedModel(
            f"config.json: partial_rotary_factor {share} turns {turned} of a head's {head_dim} dimensions, which is "
            "not an even number of them"
        )


def require_full_rope(config: TextConfig) -> None:
    """Raise for a rope that turns only part of a head, or whose numbers make no sense."""
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor is not 1: partial rotary embedding is not supported")
    require_rope(config, MAX_HEAD_DIM)


def check_plain_decoder(config: TextConfig) -> None:
    """What ``worker.models.decoder`` computes: grouped-query attention, full rope, a SiLU-gated feed-forward."""
    require_sizes(
        config,
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "intermediate_size",
        "max_position_embeddings",
    )
    require_positive("rms_norm_eps", config.rms_norm_eps)
    require_multiple(config, "num_attention_heads", "num_key_value_heads")
    if hasattr(config, "head_dim") and config.head_dim is not None:
        require_head_dim("head_dim", config.head_dim)
    require_setting(config, "hidden_act", "silu")
    require_full_rope(config)
    if hasattr(config, "sliding_window") and config.sliding_window is not None:
        require_sizes(config, "sliding_window")
    if hasattr(config, "layer_types") and config.layer_types is not None:
        require_entries(config, "layer_types", (FULL, SLIDING))
        if SLIDING in config.layer_types:
            require_sizes(config, "sliding_window")
