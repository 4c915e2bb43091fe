"""Tensor names: GGUF's (``blk.0.attn_q.weight``) to Hugging Face's (``model.layers.0.self_attn.q_proj.weight``)."""

import re
from dataclasses import dataclass

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class TensorRole:
    """What a GGUF tensor is: its layer (None outside the layers), its GGUF stem, and its Hugging Face name."""

    layer: int | None
    stem: str
    name: str


def role_of(gguf_name: str) -> TensorRole | None:
    """The tensor's role in a dense decoder, None if it has none there."""
    match = _NAME.fullmatch(gguf_name)
    if match is None:
        return None
    layer, stem, suffix = match.groups()
    module = (_OUTER if layer is None else _IN_BLOCK).get(stem)
    if module is None:
        return None
    if layer is None:
        return TensorRole(None, stem, f"{module}.{suffix}")
    return TensorRole(int(layer), stem, f"model.layers.{layer}.{module}.{suffix}")
