"""DeepSeek V3.2: V3 with an indexer in every layer, which chooses the tokens that a row attends to."""

from worker.layers.latent_attention import IndexShape
from worker.models.config_checks import require_at_most, require_entries, require_setting_if_given, require_sizes
from worker.models.deepseek import DeepseekShape
from worker.models.deepseek_v3 import DeepseekV3, check_deepseek_v3
from worker.text_config import TextConfig


class DeepseekV32(DeepseekV3):
    """``DeepseekV32ForCausalLM``."""

    @staticmethod
    def shape_of(config: TextConfig) -> DeepseekShape:
        """Attention's rotary dimensions are interleaved, the indexer's are not."""
        index = IndexShape(config.index_n_heads, config.index_head_dim, config.index_topk)
        return DeepseekShape.of(config, interleaved=True, index=index)

    @staticmethod
    def is_mixture(config: TextConfig, index: int) -> bool:
        """By list, which follows ``first_k_dense_replace`` where it is not given."""
        return bool(config.mlp_layer_types[index] == "sparse")


def check_deepseek_v32(config: TextConfig) -> None:
    """Refuse what this file does not compute."""
    check_deepseek_v3(config)
    require_sizes(config, "q_lora_rank", "index_n_heads", "index_head_dim", "index_topk")
    # An index key begins with its rotary part.
    require_at_most(config, "qk_rope_head_dim", "index_head_dim")
    require_entries(config, "layer_types", ("indexed_attention",))
    require_entries(config, "mlp_layer_types", ("dense", "sparse"))
    require_setting_if_given(config, "rope_interleave", True)
    require_setting_if_given(config, "indexer_rope_interleave", False)
