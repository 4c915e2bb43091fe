"""Qwen2: the plain decoder with biases on queries, keys and values."""

from transformers import PretrainedConfig

from worker.models.decoder import Decoder, DecoderShape


class Qwen2(Decoder):
    """``Qwen2ForCausalLM``."""

    @staticmethod
    def shape_of(config: PretrainedConfig) -> DecoderShape:
        """Biases are part of the architecture, not of the configuration."""
        return DecoderShape(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            norm_epsilon=config.rms_norm_eps,
            tied_embeddings=config.tie_word_embeddings,
            qkv_bias=True,
        )
