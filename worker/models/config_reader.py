"""Reads a checkpoint's configuration through transformers, which knows every family's defaults.

Importing it takes seconds: a rank does so only for a model whose configuration nobody has handed to it.
"""

from collections.abc import Mapping
from typing import cast

from transformers import CONFIG_MAPPING, PretrainedConfig

from worker.models.config_checks import UnsupportedModel
from worker.models.hunyuan_config import HunyuanConfig, HunyuanLargeConfig
from worker.models.hymba_config import HymbaConfig
from worker.models.registry import ARCHITECTURES, ModelConfig
from worker.text_config import TextConfig

MAX_LAYERS = 1024
LABELS = frozenset({"num_labels", "id2label", "label2id"})
OWN_CONFIGS: Mapping[str, type[PretrainedConfig]] = {
    "HunYuanDenseV1ForCausalLM": HunyuanConfig,
    "HunYuanForCausalLM": HunyuanLargeConfig,
    "HunYuanMoEV1ForCausalLM": HunyuanConfig,
    "HymbaForCausalLM": HymbaConfig,
}
"""Of architectures that transformers does not have, or of which it reads a part."""


def parse_config(content: Mapping[str, object]) -> ModelConfig:
    """Read config.json's content.

    Raises ``UnsupportedModel`` for an architecture or a setting that we do not compute.
    """
    name = _architecture(content)
    architecture = ARCHITECTURES[name]
    content = _without_labels(content)
    text = content.get("text_config") if architecture.text_part else content
    if isinstance(text, Mapping):
        # Before transformers sees them, which makes lists of that length.
        _require_count(text, "num_hidden_layers", 1)
        _require_count(text, "first_k_dense_replace", 0)
    try:
        config_class = OWN_CONFIGS.get(name) or CONFIG_MAPPING[content.get("model_type")]
        config = config_class.from_dict(dict(content))
        if architecture.text_part:
            # The outer configuration says whether the head is tied, whatever the inner one says.
            tied = config.tie_word_embeddings
            config = config.text_config
            config.tie_word_embeddings = tied
    except Exception as error:
        raise UnsupportedModel(f"config.json of {name} cannot be read: {error}") from error
    if content.get("quantization_config") is not None:
        raise UnsupportedModel(
            "quantization_config is set: quantized safetensors checkpoints are not supported; use "
            "an unquantized checkpoint or a GGUF file"
        )
    try:
        architecture.check(config)
        return ModelConfig(name, _plain(config) or config)
    except (TypeError, ArithmeticError, AttributeError, LookupError) as error:
        raise UnsupportedModel(f"config.json of {name} has a value of the wrong kind: {error}") from error


def _without_labels(content: Mapping[str, object]) -> dict[str, object]:
    """Leave out a classifier's labels: nothing here has any, and transformers makes a name for each, however many."""
    left = {name: value for name, value in content.items() if name not in LABELS}
    return {name: _without_labels(value) if isinstance(value, Mapping) else value for name, value in left.items()}


def _plain(config: PretrainedConfig) -> TextConfig | None:
    """The same fields without transformers, or None if one of them is more than a value.

    That is so where layers differ in some, and where transformers computes the frequencies of a scaled rope.
    """
    rope = config.rope_parameters
    ropes = rope.values() if all(isinstance(each, dict) for each in rope.values()) else [rope]
    if config.is_heterogeneous or any(each["rope_type"] != "default" for each in ropes):
        return None
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_") and _is_value(value)}
    fields |= {name: fields[meant] for name, meant in config.attribute_map.items() if meant in fields}
    return TextConfig(**fields, per_layer_config=None)


def _is_value(value: object) -> bool:
    """Whether it is a number, a string, or a list or map of such."""
    if isinstance(value, dict):
        return all(map(_is_value, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_value, value))
    return value is None or isinstance(value, bool | int | float | str)


def _require_count(content: Mapping[str, object], field: str, least: int) -> None:
    """Raise unless a number of layers, if it is given, is one."""
    value = content.get(field, least)
    if not (type(value) is int and least <= value <= MAX_LAYERS):
        raise UnsupportedModel(f"config.json: {field} is {value!r}, not a whole number from {least} to {MAX_LAYERS}")


def _architecture(content: Mapping[str, object]) -> str:
    names = content.get("architectures")
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise UnsupportedModel('config.json has no "architectures"')
    known = [name for name in cast("list[str]", names) if name in ARCHITECTURES]
    if not known:
        raise UnsupportedModel(
            f"architecture {', '.join(names)} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return known[0]
