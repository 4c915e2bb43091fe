"""Llama (and SmolLM2): the plain decoder, with optional biases."""

from transformers import PretrainedConfig

from worker.models.decoder import Decoder, DecoderShape


class Llama(Decoder):
    """``LlamaForCausalLM``."""

    @staticmethod
    def shape_of(config: PretrainedConfig) -> DecoderShape:
        """Biases as the configuration says."""
        return DecoderShape.of(
            config,
            head_dim=config.head_dim,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )
