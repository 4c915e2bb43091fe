"""From the architecture that a checkpoint names to the class that computes it, and to a built model.

A new model is one file and one line here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from worker.kv_cache.sharing import ModelDeclared
from worker.layers.cache_format import CacheFormat
from worker.layers.weights import WeightFormat
from worker.models.config_checks import MAX_SIZE, UnsupportedModel, check_plain_decoder
from worker.models.deepseek_v2 import DeepseekV2, check_deepseek_v2
from worker.models.deepseek_v3 import PREDICTION_LAYERS, DeepseekV3, check_deepseek_v3
from worker.models.deepseek_v32 import DeepseekV32, check_deepseek_v32
from worker.models.gemma3 import MULTIMODAL as GEMMA3_MULTIMODAL
from worker.models.gemma3 import Gemma3, check_gemma3
from worker.models.gemma3n import MULTIMODAL as GEMMA3N_MULTIMODAL
from worker.models.gemma3n import Gemma3n, check_gemma3n
from worker.models.gemma4 import MULTIMODAL as GEMMA4_MULTIMODAL
from worker.models.gemma4 import Gemma4, check_gemma4
from worker.models.hunyuan import (
    Hunyuan,
    HunyuanLarge,
    check_hunyuan,
    check_hunyuan_dense,
    check_hunyuan_moe,
)
from worker.models.hymba import Hymba, check_hymba, meta_tokens
from worker.models.llama import Llama, check_llama
from worker.models.mistral import Mistral, check_mistral
from worker.models.mistral_large4 import MistralLarge4, check_mistral_large4
from worker.models.model import Model, ModelContext
from worker.models.qwen2 import Qwen2
from worker.models.qwen3 import Qwen3
from worker.models.qwen3_moe import Qwen3Moe, check_qwen3_moe
from worker.models.qwen3_next import Qwen3Next, check_qwen3_next
from worker.ranks.rank_group import CannotSplit, DescribedRank
from worker.text_config import ReadConfig, TextConfig

GEMMA_ENCODERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a checkpoint that names it is read.

    ``check`` raises ``UnsupportedModel`` for a setting that ``model`` would not honour; it sees transformers' object.
    Of a multimodal checkpoint, ``text_part`` is true: only the text model is served, and tensors whose names begin with
    one of ``unserved`` are left alone. ``prefix_tokens`` gives ids after the vocabulary's that stand before every
    sequence, in the cache like any other token.
    """

    model: Callable[[TextConfig, ModelContext], Model]
    check: Callable[[TextConfig], None]
    text_part: bool = False
    unserved: tuple[str, ...] = ()
    prefix_tokens: Callable[[TextConfig], tuple[int, ...]] = lambda config: ()


ARCHITECTURES: Mapping[str, Architecture] = {
    "DeepseekV2ForCausalLM": Architecture(DeepseekV2, check_deepseek_v2),
    "DeepseekV3ForCausalLM": Architecture(DeepseekV3, check_deepseek_v3, unserved=PREDICTION_LAYERS),
    "DeepseekV32ForCausalLM": Architecture(DeepseekV32, check_deepseek_v32, unserved=PREDICTION_LAYERS),
    "Gemma3ForCausalLM": Architecture(Gemma3, check_gemma3),
    "Gemma3ForConditionalGeneration": Architecture(
        partial(Gemma3, names=GEMMA3_MULTIMODAL),
        check_gemma3,
        text_part=True,
        unserved=("vision_tower.", "multi_modal_projector."),
    ),
    "Gemma3nForCausalLM": Architecture(Gemma3n, check_gemma3n),
    "Gemma3nForConditionalGeneration": Architecture(
        partial(Gemma3n, names=GEMMA3N_MULTIMODAL), check_gemma3n, text_part=True, unserved=GEMMA_ENCODERS
    ),
    "Gemma4ForCausalLM": Architecture(Gemma4, check_gemma4),
    "Gemma4ForConditionalGeneration": Architecture(
        partial(Gemma4, names=GEMMA4_MULTIMODAL), check_gemma4, text_part=True, unserved=GEMMA_ENCODERS
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(Hunyuan, check_hunyuan_dense),
    "HunYuanForCausalLM": Architecture(HunyuanLarge, check_hunyuan),
    "HunYuanMoEV1ForCausalLM": Architecture(Hunyuan, check_hunyuan_moe),
    "HymbaForCausalLM": Architecture(Hymba, check_hymba, prefix_tokens=meta_tokens),
    "LlamaForCausalLM": Architecture(Llama, check_llama),
    "MistralForCausalLM": Architecture(Mistral, check_mistral),
    "MistralLarge4ForConditionalGeneration": Architecture(
        MistralLarge4,
        check_mistral_large4,
        text_part=True,
        unserved=(
            "vision_encoder.",
            "vision_language_adapter.",
            "patch_merger.",
            "pre_mm_projector_norm.",
            # A drafter for speculative decoding.
            "mtp_dspark.",
        ),
    ),
    "Qwen2ForCausalLM": Architecture(Qwen2, check_plain_decoder),
    "Qwen3ForCausalLM": Architecture(Qwen3, check_plain_decoder),
    "Qwen3MoeForCausalLM": Architecture(Qwen3Moe, check_qwen3_moe),
    # Multi-token prediction is a drafter for speculative decoding.
    "Qwen3NextForCausalLM": Architecture(Qwen3Next, check_qwen3_next, unserved=("mtp.",)),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint's architecture and the configuration of the part that is served, defaults filled in."""

    name: str
    config: TextConfig

    @classmethod
    def of(cls, read: ReadConfig) -> "ModelConfig":
        """What somebody else has read and checked."""
        return cls(read.architecture, read.text)

    @property
    def read(self) -> ReadConfig | None:
        """What others need to build the same, or None if they have to read it themselves."""
        return ReadConfig(self.name, self.config) if isinstance(self.config, TextConfig) else None

    @property
    def architecture(self) -> Architecture:
        """How a checkpoint of this name is read."""
        return ARCHITECTURES[self.name]

    def build(self, context: ModelContext) -> Model:
        """Build the model, weights allocated but not loaded.

        Raises ``UnsupportedModel`` for ranks that cannot share it. On the ``meta`` device nothing else can go wrong but
        the configuration: raises it for a value whose kind nobody checked.
        """
        try:
            return self.architecture.model(self.config, context)
        except CannotSplit as error:
            counts = ", ".join(map(str, valid_rank_counts(self)))
            raise UnsupportedModel(
                f"--tensor-parallel-size {context.weights.ranks.size}: {error}; possible for this model: {counts}"
            ) from error
        except (TypeError, ArithmeticError, RuntimeError, MemoryError) as error:
            if context.weights.device.type != "meta":
                raise
            raise UnsupportedModel(f"no {self.name} can be built from this config.json: {error}") from error

    @property
    def prefix_tokens(self) -> tuple[int, ...]:
        """What stands before the prompt of every sequence, at the first positions."""
        return self.architecture.prefix_tokens(self.config)

    @property
    def longest_context(self) -> int:
        """Tokens up to which the model is computed as it was trained."""
        limit = int(self.config.max_position_embeddings)
        rope = self.config.rope_parameters
        if rope.get("rope_type") == "dynamic":
            # There the field is the trained length, beyond which the frequencies begin to stretch.
            limit = int(min(limit * rope["factor"], MAX_SIZE))
        return limit

    def choose_context(self, wanted: int | None) -> int:
        """Resolve ``--max-model-len`` against what the model can do."""
        if wanted is not None and wanted > self.longest_context:
            raise UnsupportedModel(
                f"--max-model-len {wanted} is more than the {self.longest_context} tokens up to which this model is "
                f"served (max_position_embeddings {self.config.max_position_embeddings})"
            )
        if wanted is not None and wanted < 2:
            raise UnsupportedModel(f"--max-model-len {wanted} leaves no room for a prompt and an answer")
        return wanted or self.longest_context


def valid_rank_counts(config: ModelConfig, upto: int = 16) -> tuple[int, ...]:
    """What ``--tensor-parallel-size`` can be, of 1 to ``upto``: the numbers of ranks that can share the model."""
    return tuple(size for size in range(1, upto + 1) if _can_be_split(config, size))


def _can_be_split(config: ModelConfig, size: int) -> bool:
    meta = torch.device("meta")
    context = ModelContext(
        weights=WeightFormat(torch.bfloat16, meta, DescribedRank(0, size)),
        cache=CacheFormat(16, torch.bfloat16),
        sharing=ModelDeclared(),
        max_model_len=2,
    )
    try:
        config.architecture.model(config.config, context)
    except CannotSplit:
        return False
    return True
