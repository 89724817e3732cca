"""A stand-in for a target where there is only text."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdec.target.target import Target


class TextTarget(Target):
    """Stands in for the target where there is only text: a vocabulary, and no model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str):
        self.tokenizer, self.name = tokenizer, name
        self.vocab_size = max(len(tokenizer), tokenizer.vocab_size)
        self.eos_token_ids = frozenset()

    @property
    def device(self) -> torch.device:
        """Everything is on the CPU."""
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        """Refuse whatever only a model could answer."""
        raise ValueError(f"it asks the target for its {name}, and over texts there is no model")
