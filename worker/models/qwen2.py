"""Qwen2: the plain decoder with biases on queries, keys and values."""

from worker.models.decoder import Decoder, DecoderShape
from worker.text_config import TextConfig


class Qwen2(Decoder):
    """``Qwen2ForCausalLM``."""

    @staticmethod
    def shape_of(config: TextConfig) -> DecoderShape:
        """Biases are part of the architecture, not of the configuration."""
        return DecoderShape.of(config, qkv_bias=True)
