"""One training loop for every model that this project trains: resumable, the same on a CPU and a GPU."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from experiments.training.checkpoints import Checkpoints
from experiments.training.fitting import Schedule, optimizers_of, set_learning_rates


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
    schedule: Schedule,
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
        schedule: How long and how fast.
        accelerator: Device, precision and processes.
        checkpoint: Its folder ``checkpoints`` takes the training state. Training goes on from what is there.
        name: Shown on the progress bar.
    """
    config_of: Any = module  # MedusaHeads has its vocabulary itself, a transformers model in its config
    vocab_size = getattr(module, "vocab_size", None) or config_of.config.vocab_size
    plain = module.to(accelerator.device)
    made = optimizers_of(plain, schedule, {vocab_size}, weight_decay=0.0, muon_weight_decay=0.01)
    clipped = [parameter for group in made[-1].param_groups for parameter in group["params"]]  # AdamW's
    kept = Checkpoints(checkpoint / "checkpoints", keep=1)
    first, newest = 0, kept.newest()
    if newest is not None:
        state = kept.load(newest, torch.device("cpu"))
        first = state["step"]
        plain.load_state_dict(state["module"])
        for optimizer, saved in zip(made, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    module, *optimizers = accelerator.prepare(plain, *made)
    recent: list[float] = []
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"), disable=not (accelerator.is_main_process and sys.stderr.isatty()),
    )  # fmt: skip
    module.train()
    start = time.monotonic()
    with bar:
        task = bar.add_task(name, total=schedule.steps, completed=first, loss=float("nan"))
        for step in range(first, schedule.steps):
            tokens = windows.batch(step, accelerator.process_index, accelerator.num_processes)
            with accelerator.autocast():
                value = loss(module, tokens.to(accelerator.device), step / schedule.steps)
            accelerator.backward(value)
            accelerator.clip_grad_norm_(clipped, 1.0)
            set_learning_rates(optimizers, schedule.factor(step))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            recent = [*recent, value.item()][-max(1, schedule.steps // 10) :]
            mean = sum(recent) / len(recent)
            bar.update(task, advance=1, loss=mean)
            if accelerator.is_main_process and not sys.stderr.isatty() and step % 50 == 0:
                speed = (step + 1 - first) / (time.monotonic() - start)
                print(f"{name}: step {step}/{schedule.steps}, loss {mean:.4f}, {speed:.2f} steps/s", flush=True)
            if (step + 1) % schedule.save_every == 0 and step + 1 < schedule.steps:
                state = {"module": plain.state_dict(), "optimizers": [each.state_dict() for each in optimizers]}
                if accelerator.is_main_process:
                    kept.save(step + 1, {"step": step + 1, **state})
    accelerator.free_memory()
    module.eval()
    return sum(recent) / max(1, len(recent))
