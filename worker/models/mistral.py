"""Mistral: the plain decoder without biases. Its sliding window bounds the context that is served."""

from transformers import PretrainedConfig

from worker.models.decoder import Decoder, DecoderShape


class Mistral(Decoder):
    """``MistralForCausalLM``."""

    @staticmethod
    def shape_of(config: PretrainedConfig) -> DecoderShape:
        """No biases; the head size may be given apart from the hidden size."""
        return DecoderShape(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            norm_epsilon=config.rms_norm_eps,
            tied_embeddings=config.tie_word_embeddings,
        )
