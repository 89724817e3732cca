"""Medusa heads for tests."""

import torch

from drafters.medusa import MedusaHeads

HIDDEN, VOCAB = 32, 64


def random_heads(
    num_heads: int = 3, *, num_layers: int = 1, vocab_size: int = VOCAB, hidden: int = HIDDEN
) -> MedusaHeads:
    heads = MedusaHeads(
        num_heads=num_heads, hidden_size=hidden, vocab_size=vocab_size, num_layers=num_layers, base_model="some/base"
    )
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.eval()
