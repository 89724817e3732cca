"""Targets that a LoRA has changed a little, whose drafters know nothing of it (``experiment=adapters``)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from drafters.lora import LAYERS, Lora, widths
from experiments.datasets.text import texts
from experiments.training.data.document import tokenizer_of
from specdec.arguments import whole
from specdec.target.target import Target


def adapted(
    name: str,
    *,
    rank: int,
    files: str | Sequence[str],
    steps: int = 30,
    batch_size: int = 4,
    length: int = 128,
    lr: float = 3e-3,
    seed: int = 0,
    **options: Any,
) -> Target:
    """Returns a target with a LoRA in its weights that was trained on texts just now; the same one every time.

    Args:
        rank: The rank of the LoRA's matrices; 0 leaves the target as it is.
        seed: Seed of the weights and of the rows' order.
        **options: Of ``Target.from_pretrained``.

    Raises:
        ValueError: The texts are shorter than a row, the target has other layers, or an argument is out of its range.
    """
    rank, target = whole("target.rank", rank, least=0), Target.from_pretrained(name, **options)
    if rank == 0:
        return target
    rows = _rows(target, files, length)
    layers = widths(target.model, LAYERS, f"target.rank={rank}: {name}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lora = Lora(layers, rank)
        order = torch.randint(len(rows), (steps, batch_size))
    lora.to(target.device)
    optimizer = torch.optim.AdamW(lora.parameters(), lr=lr, weight_decay=0.0)
    losses = []
    for chosen in order:
        batch = rows[chosen].to(target.device)
        given = {"labels": batch, "use_cache": False}
        loss = functional_call(target.model, lora.changed(target.model), (batch,), given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    lora.merge(target.model)
    tenth = max(1, steps // 10)
    first, last = (sum(some) / len(some) for some in (losses[:tenth], losses[-tenth:]))
    print(
        f"a LoRA of rank {rank}: loss {first:.2f} → {last:.2f} in {steps} steps on {len(rows)} rows of {length} tokens"
    )
    target.name += f" with a LoRA of rank {rank}"
    return target


def _rows(target: Target, files: str | Sequence[str], length: int) -> Tensor:
    tokenizer = tokenizer_of(target)
    found = [tokenizer(text, verbose=False)["input_ids"] for _, text in texts(files, "target.files")]
    tokens = torch.tensor([token for document in found for token in document])
    if len(tokens) < length:
        raise ValueError(f"target.files have {len(tokens)} tokens and target.length={length}: give more text")
    return tokens[: len(tokens) // length * length].view(-1, length)
