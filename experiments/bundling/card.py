"""The model card of the bundled models."""

import platform
from dataclasses import asdict

import torch
import yaml

from experiments.bundling.config import Recipe


def model_card(facts: dict[str, object], config: Recipe) -> str:
    """The model card in Markdown, from the facts that the stages noted."""
    named = ("tokenizer", "target", "samples", "drafter", "medusa", "seed", "mixed_precision")
    recipe = yaml.safe_dump({name: value for name, value in asdict(config).items() if name in named}, sort_keys=False)
    return f"""# Model card: the bundled models

Small models for demonstrations and tests of speculative decoding. They write Python that looks right; nobody
should use them for anything else.

| | |
|---|---|
| data | the standard library's sources of CPython {platform.python_version()} (PSF licence; none of the text ships here): {facts.get("train_bytes", 0):,} bytes, {facts.get("train_tokens", 0):,} tokens |
| held out | argparse, asyncio, email, json, logging, pickle, statistics, tarfile, typing, unittest; test folders and encodings are left out besides |
| target | Llama, bf16; held-out loss {facts.get("target_bits_per_byte", float("nan")):.3f} bits per byte; {facts.get("target_distinct_4_grams", float("nan")):.0%} distinct 4-grams in 200 tokens sampled at temperature 1 |
| drafter | Llama, bf16, distilled from the target; final training loss {facts.get("drafter_loss", float("nan")):.4f} (total variation to the target) |
| Medusa heads | FasterDecoding's first format, distilled from the frozen target; final training loss {facts.get("medusa_loss", float("nan")):.4f} (weighted total variation, summed over the heads) |
| made by | `python -m experiments.bundle`, torch {torch.__version__} |

The drafter and the heads are trained on equal parts of the sources and of the target's own samples (a quarter of
them greedy), first with the forward KL divergence, then with total variation.

```yaml
{recipe}```
"""
