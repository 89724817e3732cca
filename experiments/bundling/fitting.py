"""One training loop for every model that this project trains: resumable, the same on a CPU and a GPU."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How long and how fast to train.

    Attributes:
        steps: Optimizer steps.
        batch_size: Windows per step, over all processes.
        length: Tokens per window.
        lr: Peak learning rate of AdamW, which has the embeddings, output layers, norms and biases.
        muon_lr: Peak learning rate of Muon (Jordan et al. 2024), which has the matrices between them.
        warmup: Steps of linear warm-up; a linear decay to zero follows it.
        save_every: Steps between checkpoints.
    """

    steps: int
    batch_size: int
    length: int
    lr: float
    muon_lr: float
    warmup: int = 50
    save_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "length", "warmup", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"fit.{name}={getattr(self, name)}: give at least 1")
        if self.warmup > self.steps:
            # The decay would begin before the first step, with a negative learning rate.
            raise ValueError(f"fit.warmup={self.warmup} is above fit.steps={self.steps}: give at most as many")


class Windows:
    """Shuffled windows of a token sequence; what step ``s`` sees depends on the seed and ``s`` only.

    Every epoch shifts the window grid by a random offset and visits the windows in a random order, so that a
    token is read once per epoch, and a resumed run needs no saved state.
    """

    def __init__(self, tokens: Int[Tensor, " position"], *, length: int, batch_size: int, seed: int):
        self.count = (len(tokens) - 1) // length - 1
        if self.count < batch_size:
            raise ValueError(
                f"{len(tokens)} tokens make {self.count} windows of {length}, fewer than one batch of {batch_size}: "
                f"give more text, or lower length or batch_size"
            )
        self.tokens, self.length, self.batch_size, self.seed = tokens, length, batch_size, seed

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Int[Tensor, "row position"]:
        """The ``length + 1`` tokens of each window that process ``rank`` of ``world`` trains on in this step."""
        epoch, index = divmod(step, self.count // self.batch_size)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        shift = int(torch.randint(self.length, (1,), generator=generator))
        order = torch.randperm(self.count, generator=generator)
        mine = order[index * self.batch_size : (index + 1) * self.batch_size][rank::world]
        starts = mine * self.length + shift
        return self.tokens[starts[:, None] + torch.arange(self.length + 1)].long()


def fit(
    module: nn.Module,
    loss: Callable[[nn.Module, Int[Tensor, "row position"], float], Float[Tensor, ""]],
    windows: Windows,
    config: FitConfig,
    *,
    accelerator: Accelerator,
    checkpoint: Path,
    name: str,
) -> float:
    """Train ``module`` in place and return the mean loss of the last tenth of the steps.

    Args:
        module: What to train; every parameter that requires a gradient.
        loss: ``loss(module, window tokens, progress)``, where progress runs from 0 to 1.
        windows: The data.
        config: Schedule.
        accelerator: Device, precision and processes.
        checkpoint: Folder of the training state. Training goes on from what is there.
        name: Shown on the progress bar.
    """
    matrices, others = [], []
    config_of: Any = module  # MedusaHeads has its vocabulary itself, a transformers model in its config
    vocab_size = getattr(module, "vocab_size", None) or config_of.config.vocab_size
    for parameter in module.parameters():
        inner = parameter.ndim == 2 and vocab_size not in parameter.shape
        if parameter.requires_grad:
            (matrices if inner else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def factor(step: int) -> float:
        return min((step + 1) / config.warmup, (config.steps - step) / (config.steps - config.warmup + 1))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in (muon, adam)]
    module, muon, adam = accelerator.prepare(module, muon, adam)
    accelerator.register_for_checkpointing(*schedules)
    done = checkpoint / "step.txt"
    first = 0
    if done.is_file():
        accelerator.load_state(str(checkpoint))
        first = int(done.read_text())
    recent: list[float] = []
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"), disable=not (accelerator.is_main_process and sys.stderr.isatty()),
    )  # fmt: skip
    module.train()
    start = time.monotonic()
    with bar:
        task = bar.add_task(name, total=config.steps, completed=first, loss=float("nan"))
        for step in range(first, config.steps):
            tokens = windows.batch(step, accelerator.process_index, accelerator.num_processes)
            with accelerator.autocast():
                value = loss(module, tokens.to(accelerator.device), step / config.steps)
            accelerator.backward(value)
            accelerator.clip_grad_norm_(others, 1.0)
            for stateful in (muon, adam, *schedules):
                stateful.step()
            muon.zero_grad()
            adam.zero_grad()
            recent = [*recent, value.item()][-max(1, config.steps // 10) :]
            mean = sum(recent) / len(recent)
            bar.update(task, advance=1, loss=mean)
            if accelerator.is_main_process and not sys.stderr.isatty() and step % 50 == 0:
                speed = (step + 1 - first) / (time.monotonic() - start)
                print(f"{name}: step {step}/{config.steps}, loss {mean:.4f}, {speed:.2f} steps/s", flush=True)
            if (step + 1) % config.save_every == 0 and step + 1 < config.steps:
                accelerator.save_state(str(checkpoint), safe_serialization=False)
                done.write_text(str(step + 1))
    accelerator.free_memory()
    module.eval()
    return sum(recent) / max(1, len(recent))
