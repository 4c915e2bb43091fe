"""From a checkpoint's ``architectures`` to the class that computes it, and from its configuration to a built model.

A new model is one file and one line here.
"""

import math
from collections.abc import Callable, Mapping
from typing import cast

from transformers import CONFIG_MAPPING, PretrainedConfig

from worker.models.llama import Llama
from worker.models.mistral import Mistral
from worker.models.model import Model, ModelContext
from worker.models.qwen2 import Qwen2
from worker.models.qwen3 import Qwen3

ARCHITECTURES: Mapping[str, Callable[[PretrainedConfig, ModelContext], Model]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
}


MAX_LAYERS = 1024
MAX_SIZE = (1 << 31) - 1
MAX_HEAD_DIM = 4096


class UnsupportedModel(ValueError):
    """A model, or a setting of it, that cannot be computed faithfully."""


def parse_config(content: Mapping[str, object]) -> PretrainedConfig:
    """Turn config.json's content into transformers' configuration, with the architecture's defaults.

    Raises ``UnsupportedModel`` for an architecture or a setting that we do not compute.
    """
    architecture = _architecture(content)
    layers = content.get("num_hidden_layers")
    if layers is not None and not (isinstance(layers, int) and 0 < layers <= MAX_LAYERS):
        # Before transformers sees it, which makes lists of that length.
        raise UnsupportedModel(
            f"config.json: num_hidden_layers is {layers!r}, not a whole number from 1 to {MAX_LAYERS}"
        )
    try:
        config = CONFIG_MAPPING[content.get("model_type")].from_dict(dict(content))
    except Exception as error:
        raise UnsupportedModel(f"config.json of {architecture} cannot be read: {error}") from error
    _check_sizes(config)
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"hidden_act is {config.hidden_act!r}; {architecture} is supported with 'silu' only")
    if content.get("quantization_config") is not None:
        raise UnsupportedModel(
            "quantization_config is set: quantized safetensors checkpoints are not supported; use "
            "an unquantized checkpoint or a GGUF file"
        )
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor is not 1: partial rotary embedding is not supported")
    factor = config.rope_parameters.get("factor", 1.0)
    if not (isinstance(factor, int | float) and 1.0 <= factor < math.inf):
        raise UnsupportedModel(f"config.json: the rope scaling factor is {factor!r}, not a number of at least 1")
    return config


def longest_context(config: PretrainedConfig) -> int:
    """Tokens up to which the model is computed exactly.

    Within its sliding window a layer is a full-attention layer; beyond it windows would have to be cut, which this
    version does not do.
    """
    limit = int(config.max_position_embeddings)
    if config.rope_parameters["rope_type"] == "dynamic":
        # There the field is the trained length, beyond which the frequencies begin to stretch.
        limit = int(limit * config.rope_parameters["factor"])
    layer_types = getattr(config, "layer_types", None)
    slides = config.sliding_window is not None if hasattr(config, "sliding_window") else False
    if layer_types is not None:
        slides = "sliding_attention" in layer_types
    return min(limit, int(config.sliding_window)) if slides else limit


def choose_context(config: PretrainedConfig, wanted: int | None) -> int:
    """Resolve ``--max-model-len`` against what the model can do."""
    longest = longest_context(config)
    if wanted is not None and wanted > longest:
        raise UnsupportedModel(
            f"--max-model-len {wanted} is more than the {longest} tokens up to which this model is served "
            f"(max_position_embeddings {config.max_position_embeddings}, sliding_window "
            f"{getattr(config, 'sliding_window', None)})"
        )
    if wanted is not None and wanted < 2:
        raise UnsupportedModel(f"--max-model-len {wanted} leaves no room for a prompt and an answer")
    return wanted or longest


def build_model(config: PretrainedConfig, context: ModelContext) -> Model:
    """Build the class of the configuration's architecture, weights allocated but not loaded."""
    return ARCHITECTURES[config.architectures[0]](config, context)


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


def _check_sizes(config: PretrainedConfig) -> None:
    for field in (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "intermediate_size",
        "max_position_embeddings",
    ):
        value = getattr(config, field)
        if not (isinstance(value, int) and 0 < value <= MAX_SIZE):
            raise UnsupportedModel(f"config.json: {field} is {value!r}, not a whole number from 1 to {MAX_SIZE}")
    for field, value in (
        ("rms_norm_eps", config.rms_norm_eps),
        ("rope_theta", config.rope_parameters.get("rope_theta")),
    ):
        if not (isinstance(value, int | float) and 0 < value < math.inf):
            raise UnsupportedModel(f"config.json: {field} is {value!r}, not a positive finite number")
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None and not (isinstance(head_dim, int) and 0 < head_dim <= MAX_HEAD_DIM and head_dim % 2 == 0):
        raise UnsupportedModel(f"config.json: head_dim is {head_dim!r}, not an even number from 2 to {MAX_HEAD_DIM}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise UnsupportedModel(
            f"config.json: num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
