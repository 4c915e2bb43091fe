"""Mistral: the plain decoder without biases. Its sliding window bounds the context that is served."""

from transformers import PretrainedConfig

from worker.models.decoder import Decoder, DecoderShape


class Mistral(Decoder):
    """``MistralForCausalLM``."""

    @staticmethod
    def shape_of(config: PretrainedConfig) -> DecoderShape:
        """No biases; the head size may be given apart from the hidden size."""
        return DecoderShape.of(
            config,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        )
