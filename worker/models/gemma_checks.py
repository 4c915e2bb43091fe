"""What a Gemma configuration must satisfy; each model's own check is made of these and of its own fields."""

from worker.layers.rotary import rope_parameters
from worker.models.config_checks import (
    FULL,
    SLIDING,
    UnsupportedModel,
    require_entries,
    require_positive,
    require_setting,
    require_sizes,
)
from worker.text_config import TextConfig


def check_gemma(config: TextConfig, rope_types: tuple[str, ...]) -> None:
    """Sizes of the model, its types of layers and their ropes, and what all of them compute alike."""
    require_sizes(config, "hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads")
    require_sizes(config, "sliding_window")
    require_positive("rms_norm_eps", config.rms_norm_eps)
    require_setting(config, "hidden_activation", "gelu_pytorch_tanh")
    if config.final_logit_softcapping is not None:
        require_positive("final_logit_softcapping", config.final_logit_softcapping)
    require_entries(config, "layer_types", (SLIDING, FULL))
    for layer_type in dict.fromkeys(config.layer_types):
        _check_rope(config, layer_type, rope_types)


def check_sharing(config: TextConfig) -> None:
    """Every sharing layer needs an owner of its type before the first of them."""
    shared, layers = config.num_kv_shared_layers, config.num_hidden_layers
    if not (isinstance(shared, int) and 0 <= shared < layers):
        raise UnsupportedModel(
            f"config.json: num_kv_shared_layers is {shared!r}, not a whole number from 0 to {layers - 1}, one less "
            f"than num_hidden_layers"
        )
    orphans = set(config.layer_types[layers - shared :]) - set(config.layer_types[: layers - shared])
    if orphans:
        raise UnsupportedModel(
            f"config.json: num_kv_shared_layers is {shared}, but of layer_types {', '.join(sorted(orphans))} none "
            f"comes before them whose cache they could use"
        )


def _check_rope(config: TextConfig, layer_type: str, rope_types: tuple[str, ...]) -> None:
    if not isinstance(config.rope_parameters.get(layer_type), dict):
        raise UnsupportedModel(f"config.json: rope_parameters has nothing for {layer_type}")
    parameters = rope_parameters(config, layer_type)
    kind = parameters.get("rope_type")
    if kind not in rope_types:
        raise UnsupportedModel(
            f"config.json: rope_type of {layer_type} is {kind!r}; supported: {', '.join(map(repr, rope_types))}"
        )
    require_positive(f"rope_theta of {layer_type}", parameters.get("rope_theta"))
    require_positive(f"factor of {layer_type}", parameters.get("factor", 1.0))
    part = parameters.get("partial_rotary_factor", 1.0)
    if kind == "proportional":
        require_positive(f"partial_rotary_factor of {layer_type}", part)
    if part > 1.0 or (kind != "proportional" and part != 1.0):
        raise UnsupportedModel(
            f"config.json: partial_rotary_factor of {layer_type} is {part!r}; only a rope of type 'proportional' may "
            f"turn a part of a head"
        )
