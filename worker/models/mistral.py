"""Mistral: the plain decoder without biases, in its first version with a sliding window in every layer."""

from worker.models.config_checks import FULL, SLIDING, check_plain_decoder, require_setting_if_given
from worker.models.decoder import Decoder, DecoderShape
from worker.text_config import TextConfig


def check_mistral(config: TextConfig) -> None:
    """A plain decoder's settings, and layers that are all alike, as transformers computes them whatever they say."""
    check_plain_decoder(config)
    kind = FULL if config.sliding_window is None else SLIDING
    require_setting_if_given(config, "layer_types", None, [kind] * config.num_hidden_layers)


class Mistral(Decoder):
    """``MistralForCausalLM``."""

    @staticmethod
    def shape_of(config: TextConfig) -> DecoderShape:
        """No biases."""
        return DecoderShape.of(config)
