"""Mixtures of experts against a loop over rows and experts written here, routers against transformers'."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV2Config, DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from worker.layers.moe import Experts, MixtureOfExperts, SharedExpert
from worker.layers.router import Router, SigmoidRouter, SoftmaxRouter
from worker.layers.weights import WeightFormat

HIDDEN, EXPERTS, TOP_K = 12, 16, 5
FORMAT = WeightFormat(torch.float32, torch.device("cpu"))


def spread(router: Router, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """A router's choice as a dense matrix of weights, ``[rows, experts]``."""
    experts, weights = router(F.linear(hidden, gate))
    return torch.zeros(len(hidden), len(gate)).scatter(1, experts, weights)


def spread_reference(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    _, weights, experts = module(hidden)
    return torch.zeros(len(hidden), EXPERTS).scatter(1, experts, weights)


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def gate() -> torch.Tensor:
    return torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax_router(hidden: torch.Tensor, gate: torch.Tensor, renormalize: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=renormalize
    )
    reference = Qwen3MoeTopKRouter(config)
    reference.weight.data.copy_(gate)
    expected = spread_reference(reference, hidden)
    torch.testing.assert_close(spread(SoftmaxRouter(TOP_K, renormalize), hidden, gate), expected)


@pytest.mark.parametrize(("method", "groups", "top_groups"), [("greedy", 1, 1), ("group_limited_greedy", 4, 2)])
def test_softmax_router_with_groups(
    hidden: torch.Tensor, gate: torch.Tensor, method: str, groups: int, top_groups: int
) -> None:
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        num_attention_heads=1,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        topk_method=method,
        n_group=groups,
        topk_group=top_groups,
        routed_scaling_factor=2.5,
    )
    reference = DeepseekV2TopkRouter(config)
    reference.weight.data.copy_(gate)
    router = SoftmaxRouter(TOP_K, renormalize=False, scale=2.5, groups=groups, top_groups=top_groups)
    torch.testing.assert_close(spread(router, hidden, gate), spread_reference(reference, hidden))


@pytest.mark.parametrize("renormalize", [False, True])
def test_sigmoid_router(hidden: torch.Tensor, gate: torch.Tensor, renormalize: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_group=4,
        topk_group=2,
        norm_topk_prob=renormalize,
        routed_scaling_factor=1.7,
    )
    reference = DeepseekV3TopkRouter(config)
    correction = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(5))
    reference.weight.data.copy_(gate)
    reference.e_score_correction_bias.copy_(correction)
    router = SigmoidRouter(EXPERTS, TOP_K, FORMAT, renormalize=renormalize, scale=1.7, groups=4, top_groups=2)
    router.correction.copy_(correction)
    uncorrected = SigmoidRouter(EXPERTS, TOP_K, FORMAT, renormalize=renormalize, scale=1.7, groups=4, top_groups=2)
    uncorrected.correction.zero_()

    expected = spread_reference(reference, hidden)
    torch.testing.assert_close(spread(router, hidden, gate), expected)
    assert not torch.allclose(spread(uncorrected, hidden, gate), expected), "the correction changes choices"


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("gated", [False, True])
def test_mixture_equals_a_loop_over_rows(hidden: torch.Tensor, rows: int, gated: bool) -> None:
    hidden = hidden[:rows]
    mixture = MixtureOfExperts(
        Experts(EXPERTS, HIDDEN, 6, FORMAT),
        SoftmaxRouter(2, renormalize=True),
        FORMAT,
        shared=SharedExpert("shared_expert", HIDDEN, 10, FORMAT, gated=gated),
    )
    generator = torch.Generator().manual_seed(6)
    weights = {}
    for slot in mixture.slots("mlp"):
        weights[slot.name] = torch.randn(slot.destination.shape, generator=generator)
        slot.destination.copy_(weights[slot.name])

    def gated_mlp(row: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up, down = (weights[f"mlp.{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return down @ (F.silu(gate @ row) * (up @ row))

    expected = []
    for row in hidden:
        probabilities = (weights["mlp.gate.weight"] @ row).exp()
        best = sorted(range(EXPERTS), key=lambda expert: -probabilities[expert])[:2]
        total = sum(probabilities[expert] for expert in best)
        shared = gated_mlp(row, "shared_expert")
        if gated:
            shared = shared / (1 + (-weights["mlp.shared_expert_gate.weight"] @ row).exp())
        expected.append(shared + sum(probabilities[e] / total * gated_mlp(row, f"experts.{e}") for e in best))
    torch.testing.assert_close(mixture(hidden), torch.stack(expected), atol=1e-4, rtol=1e-5)


def test_a_gate_in_float32_tells_apart_what_bfloat16_cannot() -> None:
    """Two experts whose scores differ by less than the model's dtype can hold."""
    half = WeightFormat(torch.bfloat16, FORMAT.device)
    layer = MixtureOfExperts(Experts(2, 2, 4, half), SoftmaxRouter(1, False), half, gate_dtype=torch.float32)
    for slot in layer.slots("mlp"):
        slot.destination.fill_(1.0)
    layer.gate.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 1e-4]]))
    layer.experts.down[0] = 0.0
    assert layer(torch.ones(1, 2, dtype=torch.bfloat16)).abs().min() > 0
