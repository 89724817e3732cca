"""The models and devices that the chapter works with."""

from pathlib import Path
from typing import Any

from specdec.physics.bounds import Roof
from specdec.physics.devices import Device, read_devices
from specdec.physics.nominal import nominal
from specdec.physics.precision import Precision
from specdec.physics.shape import ModelShape

HALF = Precision()
"""Two bytes for every number, as in float16 and bfloat16."""

MACHINE = Path(__file__).with_name("machine.yaml")
"""What ``measure=true`` has measured, in the form of the table of devices."""

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
LLAMA_2_7B_CONFIG = LLAMA_8B_CONFIG | {
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
QWEN3_8B_CONFIG = LLAMA_8B_CONFIG | {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
QWEN3_30B_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
MIXTRAL_CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3_CONFIG: dict[str, Any] = {
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

LLAMA_70B, LLAMA_8B = ModelShape.of(LLAMA_70B_CONFIG), ModelShape.of(LLAMA_8B_CONFIG)
LLAMA_2_7B, QWEN3_8B = ModelShape.of(LLAMA_2_7B_CONFIG), ModelShape.of(QWEN3_8B_CONFIG)
ONE_HEAD = ModelShape.of(LLAMA_8B_CONFIG | {"num_key_value_heads": 1})
QWEN3_30B, MIXTRAL = ModelShape.of(QWEN3_30B_CONFIG), ModelShape.of(MIXTRAL_CONFIG)
DEEPSEEK_V3 = ModelShape.of(DEEPSEEK_V3_CONFIG)

ROUND_70B = nominal(70_000_000_000, layers=80, heads=64, kv_heads=8)
ROUND_8B = nominal(8_000_000_000, layers=32, heads=32, kv_heads=8)
NAMED_8B = nominal(8_030_000_000, layers=32, heads=32, kv_heads=8)
ROUND_7B = nominal(7_000_000_000, layers=32, heads=32, kv_heads=32)
MISTRAL_7B = nominal(7_264_000_000, layers=32, heads=32, kv_heads=8)
ROUND_15B = nominal(15_000_000_000, layers=40, heads=40, kv_heads=8)

DEVICES = read_devices()
H100, A100 = DEVICES["h100"], DEVICES["a100-80gb"]
ROUND_A100 = Roof(bandwidth=round(A100.bandwidth, -11), flops=A100.flops["float16"])
"""An A100 with the round bandwidth that texts give it."""


def this_machine() -> Device:
    """Returns the machine that ``machine.yaml`` tells of."""
    (found,) = read_devices(MACHINE).values()
    return found
