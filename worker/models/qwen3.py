"""Qwen3 (dense): the plain decoder with RMSNorm on each query and key head."""

from transformers import PretrainedConfig

from worker.models.decoder import Decoder, DecoderShape


class Qwen3(Decoder):
    """``Qwen3ForCausalLM``."""

    @staticmethod
    def shape_of(config: PretrainedConfig) -> DecoderShape:
        """Head size apart from the hidden size, normalised queries and keys."""
        return DecoderShape(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            norm_epsilon=config.rms_norm_eps,
            tied_embeddings=config.tie_word_embeddings,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
        )
