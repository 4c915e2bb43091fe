"""One tiny family as replicas serve it: prompts, the reference that judges the tokens, and the bytes that must move.

What every owner stores is read from the reference's own configuration; nothing here asks crosskv.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from tests.engine_client import Answer, EngineClient
from tests.tiny_checkpoints import VOCAB_SIZE
from worker.config import EngineConfig, Role

TOLERANCE = 1e-4
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 64, 200)
TOKENS = 48
SELECTING = ("deepseek_v32", "mistral_large4", "mistral_large4_latents_last")
"""Of two tokens with nearly equal scores the indexer takes one, and rounding decides which: these run in float64."""


@dataclass(frozen=True)
class Stored:
    """What one owner layer stores: ``floats`` per token, of every token, or of the first and of those in a window.

    They are split evenly over ``heads``.
    """

    floats: int
    window: int | None = None
    first: int = 0
    heads: int = 1

    def moved(self, before: int, ranks: int) -> int:
        """Numbers that ``ranks`` need for the last prompt token's step of the ``before`` tokens before it."""
        floats = self.floats // self.heads * max(self.heads, ranks)
        if self.window is None:
            return floats * before
        seen = {token for token in range(before) if token < self.first or before - token < self.window}
        return floats * len(seen)


@dataclass(frozen=True)
class State:
    """One recurrent layer's state, sent once, however many ranks share it."""

    floats: int

    def moved(self, before: int, ranks: int) -> int:
        del ranks
        return self.floats if before else 0


def stored_by(config: PretrainedConfig) -> list[Stored | State]:
    """What every owner stores, read from the reference's own configuration."""
    layers = range(config.num_hidden_layers)
    match config.model_type:
        case "mistral" | "qwen3" | "qwen3_moe" | "hunyuan_v1_dense" | "hunyuan_v1_moe":
            window, heads = (
                config.sliding_window if config.model_type == "mistral" else None,
                config.num_key_value_heads,
            )
            return [Stored(2 * heads * config.head_dim, window, heads=heads) for _ in layers]
        case "hunyuan":
            size = config.hidden_size // config.num_attention_heads
            owners = [layer for layer in layers if layer % config.cla_share_factor == 0]
            heads = config.num_key_value_heads
            return [Stored(2 * heads * size, heads=heads) for _ in owners]
        case "gemma3_text" | "gemma3n_text" | "gemma4_text":
            shared = 0 if config.model_type == "gemma3_text" else config.num_kv_shared_layers
            return [gemma_layer(config, layer) for layer in layers[: len(layers) - shared]]
        case "deepseek_v2" | "deepseek_v3" | "deepseek_v32":
            index = config.index_head_dim if config.model_type == "deepseek_v32" else 0
            return [Stored(config.kv_lora_rank + config.qk_rope_head_dim + index) for _ in layers]
        case "mistral_large4_text":
            stored: list[Stored | State] = []
            for layer in layers:
                if config.kv_source_layers[layer] == layer:
                    rope = config.qk_rope_head_dim if config.no_rope_layers[layer] else 0
                    stored.append(Stored(config.kv_lora_rank + rope))
                if config.indexer_types[layer] == "full":
                    stored.append(Stored(config.index_head_dim))
            return stored
        case "qwen3_next":
            keys = config.linear_num_key_heads * config.linear_key_head_dim
            values = config.linear_num_value_heads * config.linear_value_head_dim
            state = values * config.linear_key_head_dim + (2 * keys + values) * (config.linear_conv_kernel_dim - 1)
            heads = config.num_key_value_heads
            attention = Stored(2 * heads * config.head_dim, heads=heads)
            return [attention if kind == "full_attention" else State(state) for kind in config.layer_types]
        case "hymba":
            return [stored for layer in layers for stored in hymba_layer(config, layer)]
    raise AssertionError(f"nobody has said what {config.model_type} stores")


def gemma_layer(config: PretrainedConfig, layer: int) -> Stored:
    """A full layer of Gemma 4 has heads of another size, and maybe another number of them."""
    window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
    of_layer = config.per_layer_config[layer] if config.model_type == "gemma4_text" else config
    heads = of_layer.num_key_value_heads
    return Stored(2 * heads * of_layer.head_dim, window, heads=heads)


def hymba_layer(config: PretrainedConfig, layer: int) -> list[Stored | State]:
    """Keys and values twice as wide, unless an earlier layer's are used, and a Mamba in any case."""
    width = 2 * config.hidden_size
    stored: list[Stored | State] = [State(width * config.mamba_d_state + width * (config.mamba_d_conv - 1))]
    if not any(layer in group[1:] for group in config.kv_reuse_group):
        floats = config.num_key_value_heads * 3 * (config.hidden_size // config.num_attention_heads)
        slides = layer not in config.global_attn_idx
        # A row sees itself and as many tokens before it as the window says.
        stored.append(Stored(floats, config.sliding_window + 1 if slides else None, config.num_memory_tokens))
    return stored


@dataclass
class Case:
    """A family's checkpoint and reference, and prompts that no two tests share a prefix of."""

    name: str
    directory: Path
    reference: PreTrainedModel
    prompts: list[list[int]] = field(default_factory=list)
    accepted: set[tuple[int, ...]] = field(default_factory=set)
    """Prompts with answers that the reference has agreed to: most tests get the same ones."""

    def __post_init__(self) -> None:
        if self.name in SELECTING:
            self.reference.double()
            self.reference.config.get_text_config()._experts_implementation = "eager"
        generator = torch.Generator().manual_seed(11)
        self.prompts = [torch.randint(4, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]

    @property
    def prefix(self) -> int:
        """Tokens of the model's own before every prompt."""
        config = self.reference.config
        return int(config.num_memory_tokens) if config.model_type == "hymba" else 0

    def moved(self, prompt_len: int, ranks: int = 1) -> int:
        """Bytes that a prompt's transfer to a replica of so many ranks must have."""
        before = self.prefix + prompt_len - 1
        floats = sum(s.moved(before, ranks) for s in stored_by(self.reference.config.get_text_config()))
        return floats * (8 if self.name in SELECTING else 4)

    def config(self, block_size: int) -> EngineConfig:
        """Chunks are longer than every window and shorter than a prompt; pieces are smaller than a chunk."""
        return EngineConfig(
            model=str(self.directory),
            role=Role.COLOCATED,
            dtype="float64" if self.name in SELECTING else "float32",
            block_size=block_size,
            kv_cache_memory=24 << 20,
            max_batched_tokens=50,
            max_piece_bytes=4_000,
            state_checkpoint_blocks=1,
        )

    @torch.inference_mode()
    def require_tokens(self, prompt: list[int], tokens: list[int]) -> None:
        """Each token must be the reference's best after those before it, or within the tolerance of it."""
        assert len(tokens) == TOKENS
        if (*prompt, *tokens) in self.accepted:
            return
        fed = torch.tensor([[*prompt, *tokens[:-1]]])
        logits = self.reference(fed, use_cache=False).logits[0, len(prompt) - 1 :].float()
        behind = logits.max(dim=-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = int(behind.argmax())
        assert behind[worst] <= TOLERANCE, (
            f"token {worst} after a prompt of {len(prompt)} is {behind[worst]:.2e} behind"
        )
        self.accepted.add((*prompt, *tokens))

    def require_answers(self, client: EngineClient) -> list[Answer]:
        """Ask for everything at once."""
        pending = [client.submit(prompt, max_tokens=TOKENS) for prompt in self.prompts]
        answers = [p.result() for p in pending]
        for prompt, answer in zip(self.prompts, answers, strict=True):
            self.require_tokens(prompt, answer.tokens)
        return answers
