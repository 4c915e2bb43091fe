"""Gemma 3: five layers with a sliding window for each with full attention, and norms that scale by 1 + weight."""

from collections.abc import Iterator

import torch

from worker.layers.weights import Slot, WeightFormat
from worker.models.config_checks import (
    SLIDING,
    require_head_dim,
    require_multiple,
    require_positive,
    require_setting,
    require_sizes,
)
from worker.models.gemma import (
    CheckpointNames,
    GemmaDecoder,
    Hidden,
    NormalizedEntry,
    NormalizedMLP,
    Residual,
    gelu_mlp,
)
from worker.models.gemma_attention import GemmaShape, LayerShape, Values
from worker.models.gemma_checks import check_gemma
from worker.models.model import ModelContext
from worker.text_config import TextConfig

TEXT = CheckpointNames()
MULTIMODAL = CheckpointNames("language_model.model", "language_model.lm_head")


def check_gemma3(config: TextConfig) -> None:
    """Refuse what this file does not compute."""
    require_setting(config, "model_type", "gemma3_text")
    check_gemma(config, ("default", "linear"))
    require_sizes(config, "num_key_value_heads", "intermediate_size")
    require_head_dim("head_dim", config.head_dim)
    require_multiple(config, "num_attention_heads", "num_key_value_heads")
    require_positive("query_pre_attn_scalar", config.query_pre_attn_scalar)
    require_setting(config, "attn_logit_softcapping", None)
    require_setting(config, "use_bidirectional_attention", False, None)


class Gemma3Layer(NormalizedEntry):
    """A residual stream to which attention and a gated MLP are added."""

    def __init__(self, prefix: str, shape: GemmaShape, intermediate_size: int, weights: WeightFormat) -> None:
        super().__init__(prefix, shape, weights)
        mlp = gelu_mlp(shape.hidden_size, intermediate_size, weights)
        self.residual = Residual(prefix, shape, NormalizedMLP(shape, mlp, weights), weights)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from super().slots()
        yield from self.residual.slots()

    def leave(self, hidden: Hidden, normed: torch.Tensor, attended: torch.Tensor) -> Hidden:
        """See ``Layer``."""
        del normed
        return Hidden(self.residual.add_feed_forward(self.residual.add_attention(hidden.stream, attended)))


class Gemma3(GemmaDecoder):
    """``Gemma3ForCausalLM``, and the text part of ``Gemma3ForConditionalGeneration``."""

    def __init__(self, config: TextConfig, context: ModelContext, names: CheckpointNames = TEXT) -> None:
        super().__init__(config, context, names, _shape(config))

    def entry(self, config: TextConfig, index: int) -> NormalizedEntry:
        """The norm before attention."""
        del config
        return NormalizedEntry(self.prefix(index), self.shape, self.weights)

    def layer(self, config: TextConfig, index: int) -> Gemma3Layer:
        """All layers are alike."""
        return Gemma3Layer(self.prefix(index), self.shape, config.intermediate_size, self.weights)

    def embed(self, token_ids: torch.Tensor) -> Hidden:
        """The scaled embedding."""
        return Hidden(self.embedding(token_ids))


def _shape(config: TextConfig) -> GemmaShape:
    return GemmaShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=tuple(
            LayerShape(
                layer_type,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                window=config.sliding_window if layer_type == SLIDING else None,
                scale=config.query_pre_attn_scalar**-0.5,
                values=Values.PROJECTED,
            )
            for layer_type in config.layer_types
        ),
        norm_epsilon=config.rms_norm_eps,
        norm_offset=1.0,
        attention_bias=config.attention_bias,
        tied_embeddings=config.tie_word_embeddings,
        soft_cap=config.final_logit_softcapping,
    )
