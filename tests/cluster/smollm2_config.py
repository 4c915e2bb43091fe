"""SmolLM2-135M's configuration, and its sizes, for tests that need no weights."""

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY = 30, 576, 9, 3, 64, 1536, 49_152

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
