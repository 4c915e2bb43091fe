"""Qwen3-MoE: Qwen3 with a mixture of experts in most layers."""

from worker.layers.gated_mlp import FeedForward
from worker.layers.moe import Experts, MixtureOfExperts
from worker.layers.router import SoftmaxRouter
from worker.models.config_checks import check_plain_decoder, require_at_most, require_setting, require_sizes
from worker.models.model import ModelContext
from worker.models.qwen3 import Qwen3
from worker.text_config import TextConfig


def check_qwen3_moe(config: TextConfig) -> None:
    """A plain decoder's settings, and sizes of experts that make sense."""
    check_plain_decoder(config)
    require_sizes(config, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
    # Its own configurations and transformers disagree about the layers that would have a window.
    require_setting(config, "use_sliding_window", False)
    require_at_most(config, "num_experts_per_tok", "num_experts")


class Qwen3Moe(Qwen3):
    """``Qwen3MoeForCausalLM``."""

    def feed_forward(self, config: TextConfig, index: int, context: ModelContext) -> FeedForward:
        """Experts in every ``decoder_sparse_step``-th layer that is not in ``mlp_only_layers``."""
        if index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step:
            return super().feed_forward(config, index, context)
        experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size, context.weights)
        router = SoftmaxRouter(config.num_experts_per_tok, renormalize=config.norm_topk_prob)
        return MixtureOfExperts(experts, router, context.weights)
