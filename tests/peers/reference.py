"""The independent reference: transformers' own model, one prompt at a time, with KV sharing as a patched cache.

Nothing of ours is imported. A sharing layer computes its own keys and values and then never sees them: the cache hands
it its target's, which are those after the rotary embedding.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class SharingCache(DynamicCache):
    """A cache in which layer ``i`` of ``targets`` reads the keys and values of layer ``targets[i]``."""

    def __init__(self, model: PreTrainedModel, targets: Mapping[int, int]) -> None:
        super().__init__(config=model.config)
        self._targets = targets

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        target = self._targets.get(layer_idx)
        if target is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self.layers[target].keys, self.layers[target].values


class Float64RMSNorm(torch.nn.Module):
    """A Llama's RMSNorm in float64 throughout; transformers' own is computed in float32 whatever the model's dtype."""

    def __init__(self, norm: LlamaRMSNorm) -> None:
        super().__init__()
        self.weight: torch.nn.Parameter = norm.weight
        self.epsilon = norm.variance_epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.dtype is self.weight.dtype is torch.float64
        return hidden / (hidden.square().mean(-1, keepdim=True) + self.epsilon).sqrt() * self.weight


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a Llama that computes in float64 all but the tables of its rotary embedding, which define the model."""
    assert model.config._attn_implementation == "sdpa", "transformers' eager attention has its softmax in float32"
    exact = copy.deepcopy(model).double()
    for name, module in [*exact.named_modules()]:
        if isinstance(module, LlamaRMSNorm):
            exact.set_submodule(name, Float64RMSNorm(module))
    return exact


@dataclass(frozen=True, slots=True)
class Generation:
    """Greedy tokens after a prompt; ``logits`` float32 ``[tokens, vocab]`` are those that each was chosen from."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor


@dataclass(frozen=True)
class Reference:
    """A model of transformers. ``targets`` maps the index of each sharing layer to its target's."""

    model: PreTrainedModel
    targets: Mapping[int, int] = field(default_factory=dict)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of every token, float32 ``[tokens, vocab]``."""
        output = self.model(torch.tensor([tokens]), cache=SharingCache(self.model, self.targets), use_cache=True)
        return output.logits[0].float()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], count: int) -> Generation:
        """``count`` tokens, one at a time, whatever they are."""
        cache = SharingCache(self.model, self.targets)
        tokens: list[int] = []
        logits: list[torch.Tensor] = []
        fed = list(prompt)
        while len(tokens) < count:
            output = self.model(torch.tensor([fed]), cache=cache, use_cache=True, logits_to_keep=1)
            logits.append(output.logits[0, -1].float())
            fed = [int(logits[-1].argmax())]
            tokens += fed
        return Generation(list(prompt), tokens, torch.stack(logits))

    @torch.inference_mode()
    def follow(self, prompt: Sequence[int], tokens: Sequence[int]) -> Generation:
        """What greedy decoding says after each of ``tokens``, in one pass instead of one per token.

        If its tokens are ``tokens``, then these are, by induction, what ``greedy`` gives.
        """
        fed = torch.tensor([[*prompt, *tokens[:-1]]])
        cache = SharingCache(self.model, self.targets)
        logits = self.model(fed, cache=cache, use_cache=True, logits_to_keep=len(tokens)).logits[0].float()
        return Generation(list(prompt), logits.argmax(dim=-1).tolist(), logits)
