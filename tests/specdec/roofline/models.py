"""Models whose sizes the tests of costs share."""

from typing import Any

from specdec.roofline.nominal import nominal
from specdec.roofline.shape import ModelShape

LLAMA_70B_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
LLAMA_8B_CONFIG = LLAMA_70B_CONFIG | {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
}
LLAMA_70B, LLAMA_8B = ModelShape.of(LLAMA_70B_CONFIG), ModelShape.of(LLAMA_8B_CONFIG)

DEEPSEEK_V3 = ModelShape.of(
    {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "tie_word_embeddings": False,
    }
)

NOMINAL_70B = nominal(70_000_000_000, layers=80, heads=64, kv_heads=8)
NOMINAL_8B = nominal(8_000_000_000, layers=32, heads=32, kv_heads=8)
