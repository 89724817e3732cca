"""The models that the recipe trains: new ones, saved ones, and text sampled from the target."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafters.medusa_heads import MedusaHeads
from experiments.bundling.config import LlamaSize, SamplesConfig


def new_llama(size: LlamaSize, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with random weights, tied embeddings and the tokenizer's vocabulary."""
    eos: Any = tokenizer.eos_token_id
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=eos,
            pad_token_id=None,
            **asdict(size),
        )
    )


def new_medusa_heads(target: LlamaForCausalLM, num_heads: int) -> MedusaHeads:
    """Heads that begin, as in the published recipe, as the target's own output layer each."""
    made = MedusaHeads(
        num_heads=num_heads,
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        base_model="bundled/target",
    )
    heads: Any = made.heads
    for head in heads:
        head[-1].weight.data.copy_(target.lm_head.weight)
    return made


def save_llama(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a model in bfloat16, with its tokenizer."""
    model.to(torch.bfloat16).save_pretrained(out)  # pyright: ignore[reportArgumentType] (a decorator hides self)
    tokenizer.save_pretrained(out)


def load_target(work: Path, device: torch.device) -> LlamaForCausalLM:
    """The trained target, frozen, in the dtype it ships in: what is distilled is what is drafted for."""
    model = AutoModelForCausalLM.from_pretrained(work / "target" / "model", dtype=torch.bfloat16)
    return model.to(device).eval().requires_grad_(False)  # pyright: ignore[reportArgumentType, reportReturnType]


@torch.inference_mode()
def sample_texts(
    target: LlamaForCausalLM,
    tokens: Int[Tensor, " position"],
    config: SamplesConfig,
    *,
    seed: int,
    device: torch.device,
) -> Int[Tensor, " position"]:
    """Continue random training windows with the target itself; returns the sampled windows end to end."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    batches = config.count // config.batch_size
    for index in track(range(batches), description="samples"):
        starts = torch.randint(len(tokens) - config.prompt_length, (config.batch_size,), generator=generator)
        prompts = tokens[starts[:, None] + torch.arange(config.prompt_length)].long().to(device)
        sampled = target.generate(  # pyright: ignore[reportAttributeAccessIssue] (its protocol asks too much)
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_length=config.length,
            min_length=config.length,
            do_sample=index >= config.greedy_fraction * batches,
            top_k=0,
            pad_token_id=0,
        )
        rows.append(sampled.cpu())
        print(f"samples: batch {index + 1}/{batches}", flush=True)
    return torch.cat(rows).flatten().to(torch.int32)
