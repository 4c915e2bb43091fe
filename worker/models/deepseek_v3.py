"""DeepSeek V3 and R1: experts by sigmoid with a learned correction, in the best groups of them."""

from worker.layers.router import Router, SigmoidRouter
from worker.layers.weights import WeightFormat
from worker.models.config_checks import require_setting, require_setting_if_given
from worker.models.deepseek import Deepseek, DeepseekShape
from worker.models.deepseek_checks import check_deepseek, check_expert_groups
from worker.text_config import TextConfig

PREDICTION_LAYERS = ("model.layers.61.",)
"""Tensors of the released checkpoints' multi-token prediction layer, which comes after their 61 layers."""


class DeepseekV3(Deepseek):
    """``DeepseekV3ForCausalLM``."""

    @staticmethod
    def shape_of(config: TextConfig) -> DeepseekShape:
        """No indexer."""
        return DeepseekShape.of(config, interleaved=bool(config.rope_interleave))

    @staticmethod
    def router(config: TextConfig, weights: WeightFormat) -> Router:
        """Scores, renormalised or not."""
        return SigmoidRouter(
            config.n_routed_experts,
            config.num_experts_per_tok,
            weights,
            renormalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            groups=config.n_group,
            top_groups=config.topk_group,
        )


def check_deepseek_v3(config: TextConfig) -> None:
    """Refuse what this file does not compute."""
    check_deepseek(config)
    # A group is judged by its two best experts.
    check_expert_groups(config, smallest=2)
    require_setting(config, "norm_topk_prob", True, False)
    require_setting_if_given(config, "topk_method", "noaux_tc")
    require_setting_if_given(config, "scoring_func", "sigmoid")
