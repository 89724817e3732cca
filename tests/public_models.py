"""Public models by their configurations, and models of round sizes as they are worked out by hand."""

from pathlib import Path

import yaml

from specdec.physics.reading import read_shape
from specdec.physics.shape import nominal

CONFIGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SHAPES = {name: read_shape(config) for name, config in CONFIGS.items()}
LLAMA_70B, LLAMA_8B, DEEPSEEK_V3 = SHAPES["llama-3.1-70b"], SHAPES["llama-3.1-8b"], SHAPES["deepseek-v3"]
ROUND_70B = nominal(70_000_000_000, layers=80, heads=64, kv_heads=8)
ROUND_8B = nominal(8_000_000_000, layers=32, heads=32, kv_heads=8)
