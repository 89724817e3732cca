"""How good a trained target is: its held-out loss, and how much its own text repeats itself."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.datasets.sources import held_out_files, read_source


@torch.inference_mode()
def bits_per_byte(
    loss_of: Callable[[Tensor], Tensor], tokenizer: PreTrainedTokenizerFast, *, length: int, device: torch.device
) -> float:
    """Held-out cross entropy in bits per UTF-8 byte, over windows of ``length`` with at least half of it as context.

    Args:
        loss_of: Maps Int[row position] tokens to Float[row position-1] losses in nats.
    """
    nats, size = 0.0, 0
    for path in held_out_files():
        text = read_source(path)
        size += len(text.encode())
        ids = torch.tensor([tokenizer.eos_token_id, *tokenizer(text)["input_ids"]], device=device)
        scored = 1
        while scored < len(ids):
            end = min(len(ids), max(scored + length // 2, length))
            begin = max(0, end - length)
            losses = loss_of(ids[None, begin:end])[0]
            nats += losses[scored - begin - 1 :].double().sum().item()
            scored = end
    return nats / math.log(2) / size


@torch.inference_mode()
def distinct_4_grams(target: LlamaForCausalLM, *, count: int = 8, length: int = 200, device: torch.device) -> float:
    """Mean fraction of distinct 4-grams in ``length`` tokens sampled at temperature 1 from an end-of-text token."""
    eos = target.config.eos_token_id
    assert isinstance(eos, int), "the tokenizer of train_tokenizer has one"
    prompts = torch.full((count, 1), eos, device=device)
    rows = target.generate(  # pyright: ignore[reportAttributeAccessIssue] (its protocol asks too much)
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, pad_token_id=0,
        max_new_tokens=length, min_new_tokens=length,
    )[:, 1:].tolist()  # fmt: skip
    rates = [len({tuple(row[i : i + 4]) for i in range(length - 3)}) / (length - 3) for row in rows]
    return sum(rates) / len(rates)
