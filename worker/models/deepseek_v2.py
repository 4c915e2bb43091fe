"""DeepSeek V2 and V2-Lite: experts by softmax, in the best groups of them or anywhere."""

from worker.layers.router import Router, SoftmaxRouter
from worker.layers.weights import WeightFormat
from worker.models.config_checks import require_at_most, require_setting, require_setting_if_given
from worker.models.deepseek import Deepseek, DeepseekShape
from worker.models.deepseek_checks import check_deepseek, check_expert_groups
from worker.text_config import TextConfig


class DeepseekV2(Deepseek):
    """``DeepseekV2ForCausalLM``."""

    @staticmethod
    def shape_of(config: TextConfig) -> DeepseekShape:
        """Rotary dimensions are interleaved."""
        return DeepseekShape.of(config, interleaved=True)

    @staticmethod
    def router(config: TextConfig, weights: WeightFormat) -> Router:
        """Probabilities, not renormalised."""
        del weights
        limited = config.topk_method == "group_limited_greedy"
        return SoftmaxRouter(
            config.num_experts_per_tok,
            renormalize=False,
            scale=config.routed_scaling_factor,
            groups=config.n_group if limited else 1,
            top_groups=config.topk_group if limited else 1,
        )


def check_deepseek_v2(config: TextConfig) -> None:
    """Refuse what this file does not compute."""
    check_deepseek(config)
    require_setting(config, "topk_method", "greedy", "group_limited_greedy")
    require_setting(config, "norm_topk_prob", False)
    require_setting_if_given(config, "scoring_func", "softmax")
    if config.topk_method == "group_limited_greedy":
        check_expert_groups(config, smallest=1)
    else:
        require_at_most(config, "num_experts_per_tok", "n_routed_experts")
