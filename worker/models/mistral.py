"""Mistral: the plain decoder without biases, in its first version with a sliding window in every layer."""

from transformers import PretrainedConfig

from worker.models.config_checks import FULL, SLIDING, check_plain_decoder, require_setting_if_given
from worker.models.decoder import Decoder, DecoderShape


def check_mistral(config: PretrainedConfig) -> None:
    """A plain decoder's settings, and layers that are all alike, as transformers computes them whatever they say."""
    check_plain_decoder(config)
    kind = FULL if config.sliding_window is None else SLIDING
    require_setting_if_given(config, "layer_types", None, [kind] * config.num_hidden_layers)


class Mistral(Decoder):
    """``MistralForCausalLM``."""

    @staticmethod
    def shape_of(config: PretrainedConfig) -> DecoderShape:
        """No biases."""
        return DecoderShape.of(config)
