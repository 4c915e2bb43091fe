"""Qwen3 (dense): the plain decoder with RMSNorm on each query and key head."""

from worker.models.decoder import Decoder, DecoderShape
from worker.text_config import TextConfig


class Qwen3(Decoder):
    """``Qwen3ForCausalLM``."""

    @staticmethod
    def shape_of(config: TextConfig) -> DecoderShape:
        """Normalised queries and keys, biases in attention as the configuration says."""
        return DecoderShape.of(config, qkv_bias=config.attention_bias, output_bias=config.attention_bias, qk_norm=True)
