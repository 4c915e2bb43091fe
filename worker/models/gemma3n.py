"""Gemma 3n, the text model: alternating updates of several streams, per-layer inputs, caches shared by the last layers.

Beside attention a layer has a low-rank path (LAuReL), and the MLP of an early layer keeps only its largest activations.
None of that is cached; keys and values are those of the one active stream.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import NormalDist

import torch
import torch.nn.functional as F

from worker.layers.altup import AltUpCorrection, AltUpMerge, AltUpPrediction, AltUpShape, AltUpSpread
from worker.layers.gated_mlp import GatedMLP
from worker.layers.linear import Linear
from worker.layers.per_layer_input import PerLayerGate, PerLayerInputs
from worker.layers.weights import Slot, WeightFormat
from worker.models.config_checks import (
    SLIDING,
    UnsupportedModel,
    require_head_dim,
    require_multiple,
    require_positive,
    require_setting,
    require_sizes,
)
from worker.models.gemma import CheckpointNames, GemmaDecoder, Hidden, NormalizedMLP, Residual
from worker.models.gemma_attention import GemmaShape, LayerShape, Values
from worker.models.gemma_checks import check_gemma, check_sharing
from worker.models.model import ModelContext
from worker.ranks.rank_group import RankGroup
from worker.text_config import TextConfig

TEXT = CheckpointNames()
MULTIMODAL = CheckpointNames("model.language_model")


def check_gemma3n(config: TextConfig) -> None:
    """Refuse what this file does not compute."""
    require_setting(config, "model_type", "gemma3n_text")
    check_gemma(config, ("default", "linear"))
    check_sharing(config)
    require_sizes(config, "num_key_value_heads", "laurel_rank", "altup_num_inputs")
    require_sizes(config, "hidden_size_per_layer_input", "vocab_size_per_layer_input")
    require_head_dim("head_dim", config.head_dim)
    require_multiple(config, "num_attention_heads", "num_key_value_heads")
    active, streams = config.altup_active_idx, config.altup_num_inputs
    if not 0 <= active < streams:
        raise UnsupportedModel(f"config.json: altup_active_idx {active} is none of the {streams} altup_num_inputs")
    for size in config.intermediate_size:
        require_positive("intermediate_size", size)
    for sparsity in config.activation_sparsity_pattern:
        if not 0.0 <= sparsity < 1.0:
            raise UnsupportedModel(f"config.json: activation_sparsity_pattern has {sparsity!r}, not a share below 1")


def sparse_gelu_and_multiply(gate_up: torch.Tensor, *, deviations: float, ranks: RankGroup) -> torch.Tensor:
    """``gelu(relu(gate - cutoff)) * up`` for ``[rows, 2 * width]``; the cutoff is so many deviations above the mean."""
    gate, up = gate_up.chunk(2, dim=-1)
    mean, deviation = _mean_and_deviation(gate, ranks)
    return F.gelu(F.relu(gate - (mean + deviation * deviations)), approximate="tanh").mul_(up)


def _mean_and_deviation(part: torch.Tensor, ranks: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row over all ranks' parts of it, ``[rows, 1]`` both. Sums between ranks are in float32 at least."""
    if ranks.size == 1:
        return part.mean(dim=-1, keepdim=True), part.std(dim=-1, keepdim=True, unbiased=False)
    wide, count = part.to(torch.promote_types(part.dtype, torch.float32)), part.shape[-1] * ranks.size
    mean = ranks.sum(wide.sum(dim=-1, keepdim=True)) / count
    variance = ranks.sum((wide - mean).square_().sum(dim=-1, keepdim=True)) / count
    return mean.to(part.dtype), variance.sqrt_().to(part.dtype)


class Laurel:
    """A learned low-rank path beside a layer (Menghani et al. 2024, LAuReL-LR): the input plus its normalised image."""

    def __init__(self, rank: int, shape: GemmaShape, weights: WeightFormat) -> None:
        self.left = Linear({"linear_left": rank}, shape.hidden_size, weights)
        self.right = Linear({"linear_right": shape.hidden_size}, rank, weights)
        self.norm = shape.norm(weights)

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Weights by checkpoint name; ``prefix`` is the module's."""
        yield from self.left.slots(prefix)
        yield from self.right.slots(prefix)
        yield from self.norm.slots(f"{prefix}.post_laurel_norm")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` in, a new tensor out."""
        return self.norm(self.right(self.left(hidden))).add_(hidden)


class Gemma3nEntry:
    """The first half of a layer: the streams are predicted, the active one is normalised."""

    def __init__(self, prefix: str, shape: GemmaShape, altup: AltUpShape, weights: WeightFormat) -> None:
        self._prefix = prefix
        self.prediction = AltUpPrediction(altup, weights)
        self.input_norm = shape.norm(weights)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from self.prediction.slots(f"{self._prefix}.altup")
        yield from self.input_norm.slots(f"{self._prefix}.input_layernorm")

    def enter(self, hidden: Hidden) -> tuple[Hidden, torch.Tensor]:
        """The predictions go on."""
        predicted = self.prediction(hidden.stream)
        return replace(hidden, stream=predicted), self.input_norm(predicted[:, self.prediction.active])


class Gemma3nLayer(Gemma3nEntry):
    """The active stream gets attention, the low-rank path and an MLP; the others are corrected by what that changed."""

    def __init__(
        self,
        prefix: str,
        shape: GemmaShape,
        altup: AltUpShape,
        config: TextConfig,
        index: int,
        weights: WeightFormat,
    ) -> None:
        super().__init__(prefix, shape, altup, weights)
        self._index = index
        mlp = GatedMLP(
            shape.hidden_size,
            config.intermediate_size[index],
            weights,
            activate=_activation(config.activation_sparsity_pattern[index], weights),
        )
        self.laurel = Laurel(config.laurel_rank, shape, weights)
        self.residual = Residual(prefix, shape, NormalizedMLP(shape, mlp, weights), weights)
        self.correction = AltUpCorrection(self.prediction, altup, weights)
        self.gate = PerLayerGate(config.hidden_size_per_layer_input, shape.hidden_size, shape.norm_epsilon, weights)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from super().slots()
        yield from self.laurel.slots(f"{self._prefix}.laurel")
        yield from self.residual.slots()
        yield from self.correction.slots(f"{self._prefix}.altup")
        yield from self.gate.slots(self._prefix)

    def leave(self, hidden: Hidden, normed: torch.Tensor, attended: torch.Tensor) -> Hidden:
        """See ``Layer``."""
        assert hidden.per_layer is not None
        predicted = hidden.stream
        computed = self.residual.add_attention(predicted[:, self.prediction.active], attended)
        computed = self.residual.add_feed_forward(computed.add_(self.laurel(normed)).div_(math.sqrt(2.0)))
        streams = self.correction(predicted, computed)
        # The per-layer input goes to all streams but the first, whichever is active.
        addition = self.gate(self.correction.output(streams), hidden.per_layer[:, self._index])
        streams[:, 1:].add_(addition[:, None])
        return replace(hidden, stream=streams)


class Gemma3n(GemmaDecoder):
    """The text part of ``Gemma3nForConditionalGeneration``, and ``Gemma3nForCausalLM``."""

    def __init__(self, config: TextConfig, context: ModelContext, names: CheckpointNames = TEXT) -> None:
        self._altup = AltUpShape(
            config.altup_num_inputs,
            config.altup_active_idx,
            config.hidden_size,
            config.rms_norm_eps,
            config.altup_correct_scale,
        )
        super().__init__(config, context, names, _shape(config))
        self.spread = AltUpSpread(self._altup, self.weights)
        self.merger = None if context.headless else AltUpMerge(self._altup, self.weights)
        self._per_layer_vocab = config.vocab_size_per_layer_input
        self.per_layer = PerLayerInputs(
            config.vocab_size_per_layer_input,
            config.num_hidden_layers,
            config.hidden_size_per_layer_input,
            config.hidden_size,
            config.rms_norm_eps,
            self.weights,
            used_layers=self.computed_layers,
            projection_scale=self.weights.rounded(config.hidden_size**-0.5),
            sum_scale=self.weights.rounded(2.0**-0.5),
        )

    def entry(self, config: TextConfig, index: int) -> Gemma3nEntry:
        """Prediction and norm."""
        del config
        return Gemma3nEntry(self.prefix(index), self.shape, self._altup, self.weights)

    def layer(self, config: TextConfig, index: int) -> Gemma3nLayer:
        """A layer with its own width and sparsity."""
        return Gemma3nLayer(self.prefix(index), self.shape, self._altup, config, index, self.weights)

    def embed(self, token_ids: torch.Tensor) -> Hidden:
        """The streams of the scaled embedding, and the per-layer inputs. Tokens beyond their table have token 0's."""
        embedded = self.embedding(token_ids)
        known = token_ids.where(token_ids < self._per_layer_vocab, 0)
        return Hidden(self.spread(embedded), self.per_layer(known, embedded))

    def merge(self, hidden: Hidden) -> torch.Tensor:
        """The streams become one."""
        assert self.merger is not None
        return self.merger(hidden.stream)

    def slots(self) -> Iterator[Slot]:
        """Weights by checkpoint name."""
        yield from super().slots()
        yield from self.spread.slots(self.names.body)
        yield from self.per_layer.slots(self.names.body)
        if self.merger is not None:
            yield from self.merger.slots(self.names.body)


def _activation(sparsity: float, weights: WeightFormat) -> Callable[[torch.Tensor], torch.Tensor]:
    """The MLP's activation; ``sparsity`` is the share of it that becomes 0 if activations are normally distributed."""
    if sparsity == 0.0:
        return weights.pointwise.gelu_and_multiply
    deviations = weights.rounded(NormalDist().inv_cdf(sparsity))
    return partial(sparse_gelu_and_multiply, deviations=deviations, ranks=weights.ranks)


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
                scale=1.0,
                values=Values.NORMALIZED,
            )
            for layer_type in config.layer_types
        ),
        norm_epsilon=config.rms_norm_eps,
        attention_bias=config.attention_bias,
        tied_embeddings=config.tie_word_embeddings,
        soft_cap=config.final_logit_softcapping,
        sharing_layers=config.num_kv_shared_layers,
    )
