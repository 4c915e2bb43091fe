"""Llama (and SmolLM2): the plain decoder, with optional biases."""

from worker.models.config_checks import check_plain_decoder, require_setting_if_given
from worker.models.decoder import Decoder, DecoderShape
from worker.text_config import TextConfig


def check_llama(config: TextConfig) -> None:
    """A plain decoder's settings, and no windows: transformers' Llama would ignore them."""
    check_plain_decoder(config)
    require_setting_if_given(config, "sliding_window", None)


class Llama(Decoder):
    """``LlamaForCausalLM``."""

    @staticmethod
    def shape_of(config: TextConfig) -> DecoderShape:
        """Biases as the configuration says."""
        return DecoderShape.of(
            config,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )
