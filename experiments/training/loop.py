"""The training loop: the same for every head, on a CPU, a GPU and several."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from drafters.heads.training import Anchors, TargetStates, TextBatch
from experiments.results.origin import keep_row, kept_rows
from experiments.training.checkpoints import newest_checkpoint, save_checkpoint, write_folder
from experiments.training.comparison import Comparison, counted
from experiments.training.data.packing import Rows
from experiments.training.figures import Tally, calibrated
from experiments.training.fitting import FitConfig, optimizers_of
from experiments.training.losses import Places
from experiments.training.sharding import divide, gathered, load_optimizer, undivided
from experiments.training.states import FrozenTarget, StoredTarget

LOG = "training.jsonl"
BEST, LAST = "best", "last"
"""Folders of the finished weights: of the greatest expected length (served, if unknown), and the last step's."""


class Watcher(Protocol):
    """Shows how the training goes. Nothing that it does changes the training."""

    def step(self, done: int, figures: Mapping[str, float]) -> None:
        """So many steps are done; the figures are empty between lines of the log."""

    def evaluated(self, done: int, figures: Mapping[str, float], best: bool) -> None:
        """The head was measured."""


class DivergedError(ValueError):
    """A loss or gradient was not finite."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The tasks of a training besides its steps.

    Attributes:
        folder: Takes the log, the checkpoints and the weights.
        held_out_rows: How many of them are measured.
        serve: Returns the figures of the head in the engine; None for no such trial.
        facts: What is known about the training, for the file beside the weights.
    """

    folder: Path
    seed: int
    evaluate_every: int
    held_out: Rows
    held_out_rows: int
    serve: Callable[[], dict[str, float]] | None
    facts: Mapping[str, Any]


class Training:
    """A head that is being trained.

    Args:
        target: What the head drafts for; it may keep its states of the rows.
        vocab_size: The width of the target's logits.
        sharded: Whether every process keeps a part of the head (FSDP).
        precision: Of the head's forwards, whose weights are float32: ``"no"`` (float32), ``"bf16"`` or ``"auto"``, the
            faster one of the two here (``measured``: seconds for a row). A training that goes on keeps its own.
    """

    def __init__(
        self, comparison: Comparison, target: FrozenTarget | StoredTarget, rows: Rows, config: FitConfig, plan: Plan, *,
        accelerator: Accelerator, watcher: Watcher, vocab_size: int, sharded: bool = False, precision: str = "no",
    ):  # fmt: skip
        self.head = comparison.head
        self.target, self.rows, self.config, self.plan = target, rows, config, plan
        self.accelerator, self.watcher = accelerator, watcher
        self.checkpoints = plan.folder / "checkpoints"
        self.done, self.evaluated, self.best = 0, 0, -math.inf
        self.temperatures: list[float] | None = None
        self._whole = True  # whether the weights are those after `done` steps
        vocabularies = {vocab_size} | {len(columns) for columns in (self.head.columns,) if columns is not None}
        state, self.sharded = self._restored(), sharded
        if sharded:
            divide(comparison, accelerator)
        made = optimizers_of(self.head, config, vocabularies)
        if state is not None:
            for optimizer, saved in zip(made, state["optimizers"], strict=True):
                load_optimizer(optimizer, saved)
        self.optimizers = [accelerator.prepare_optimizer(optimizer) for optimizer in made]
        self.comparison = comparison if sharded else accelerator.prepare_model(comparison)
        self._parameters = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        self.measured: list[float] = []
        self.precision = (state or {}).get("precision", precision)
        if self.precision == "auto":
            self.precision = self._faster()

    def run(self) -> None:
        """Train to the end, from the newest checkpoint if there is one.

        Raises:
            DivergedError: A loss or gradient is not finite. Names the batch, and the checkpoint before it.
        """
        self._cut_log()
        self.comparison.train()
        before = _interrupt_on_sigterm()
        try:
            for step in range(self.done, self.config.steps):
                self._evaluate_if_due()  # here, because an attempt may have been interrupted at the end of a step
                self._step(step)
                if self.done % self.config.save_every == 0 and self.done < self.config.steps:
                    self._evaluate_if_due()
                    self._save()
            self._evaluate_if_due()
            self._save()
        except KeyboardInterrupt:
            if self._whole and not self.sharded:  # other processes may be elsewhere, and parts need all of them
                self._save()
            raise
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)
        with undivided(self.comparison):
            if self.accelerator.is_main_process:
                self._write(LAST)
                if self.plan.serve is None:
                    self._write(BEST)
        self.accelerator.wait_for_everyone()

    def _autocast(self) -> Any:
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _faster(self) -> str:
        """The precision in which a row's gradient takes less time, in all processes together; no weight changes."""
        accelerator, seconds = self.accelerator, torch.zeros(2, device=self.accelerator.device)
        number = [accelerator.process_index % len(self.rows)]
        row = self.rows.batch(number).to(accelerator.device)
        states, generator = self.target(row, number), torch.Generator().manual_seed(0)
        anchors = self.head.anchors(row, generator)
        totals = anchors.valid.sum(0).float().clamp(min=1)
        for _ in range(2):  # the first time, memory is found and kernels are made
            for at, self.precision in enumerate(("no", "bf16")):
                begun = time.perf_counter()
                with self._autocast():
                    loss, _ = self.comparison(row, states, anchors, totals, 0.0)
                accelerator.backward(loss)
                loss.detach().item()  # an accelerator works behind
                seconds[at] = time.perf_counter() - begun
        for parameter in self._parameters:
            parameter.grad = None
        self.measured = _summed(accelerator, seconds / accelerator.num_processes).tolist()
        return "bf16" if self.measured[1] < self.measured[0] else "no"

    def _step(self, step: int) -> None:
        accelerator, config = self.accelerator, self.config
        rank, world = accelerator.process_index, accelerator.num_processes
        # From the step alone: a resumed training draws what the uninterrupted one does.
        torch.manual_seed(_mixed(self.plan.seed, step, rank))
        numbers = self.rows.numbers(step, rank, world)
        size = config.micro_batch or max(1, len(numbers))
        generator = torch.Generator().manual_seed(_mixed(self.plan.seed, step, rank) + 1)
        some = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        parts = [self.rows.batch(own).to(accelerator.device) for own in some]
        prepared = [
            self._prepared(part, own, generator, keep=len(parts) == 1) for part, own in zip(parts, some, strict=True)
        ]
        depths = 1 if self.head.autoregressive else self.head.depths
        totals = torch.zeros(depths, device=accelerator.device)
        totals = _summed(accelerator, totals + sum(anchors.counted.sum(0) for anchors, _ in prepared))
        total = torch.zeros((), device=accelerator.device)
        tally = Tally(self.head.depths, accelerator.device)
        for number, (part, (anchors, states)) in enumerate(zip(parts, prepared, strict=True)):
            last = number == len(parts) - 1
            with nullcontext() if last else accelerator.no_sync(self.comparison):
                with self._autocast():
                    loss, places = self.comparison(
                        part, states or self.target(part, some[number]), anchors, totals, step / config.steps
                    )
                # The processes' gradients are averaged, and the sums were divided by the total of all.
                accelerator.backward(loss * world)
            total += loss.detach()
            tally.add(places, autoregressive=self.head.autoregressive)
        value = float(_summed(accelerator, total))
        found: Any = accelerator.clip_grad_norm_(self._parameters, config.clip or math.inf)
        norm = float(gathered(found))
        if not (math.isfinite(value) and math.isfinite(norm)):
            self._stop(step, value, norm)
        self._whole = False
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * config.factor(step)
            optimizer.step()
            optimizer.zero_grad()
        self.done, self._whole = step + 1, True
        told: dict[str, float] = {}
        if self.done % config.log_every == 0 or self.done == config.steps:
            tally.reduce(lambda sums: _summed(accelerator, sums))
            told = {"loss": value, "gradient_norm": norm, "learning_rate": config.factor(step) * config.lr}
            told |= {f"training/{name}": figure for name, figure in tally.figures().items()}
            self._log(told)
        self.watcher.step(self.done, told)

    def _prepared(
        self, part: TextBatch, numbers: list[int], generator: torch.Generator, *, keep: bool
    ) -> tuple[Anchors, TargetStates | None]:
        """Returns where drafts begin, and the target's states unless they would have to be kept for long."""
        anchors = self.head.anchors(part, generator)
        if self.head.columns is None and not keep:
            return anchors, None
        states = self.target(part, numbers)
        anchors = counted(anchors, part, states, self.head.columns, self.config.chunk)
        return anchors, states if keep else None

    def _evaluate_if_due(self) -> None:
        due = self.done > 0 and (self.done % self.plan.evaluate_every == 0 or self.done == self.config.steps)
        if due and self.evaluated != self.done:
            with undivided(self.comparison):
                self._evaluate()

    def _evaluate(self) -> None:
        """Measure the head on held-out text and in the engine, and keep it if it is the best one."""
        figures = {f"held_out/{name}": figure for name, figure in self.measure().items()}
        best = False
        if self.plan.serve is not None:
            if self.accelerator.is_main_process:
                figures |= self.plan.serve()
                length = figures.get("expected_length", figures["served_length"])
                if best := length > self.best:
                    self.best = length
                    self._write(BEST, figures)
            self.accelerator.wait_for_everyone()
            self.comparison.train()
        self.evaluated = self.done
        self._log(figures)
        self.watcher.evaluated(self.done, figures, best)

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """The teacher-forced figures on held-out text, by name."""
        tally, found = Tally(self.head.depths, self.accelerator.device), self._held_out_places()
        for places in found:
            tally.add(places, autoregressive=self.head.autoregressive)
        tally.reduce(lambda sums: _summed(self.accelerator, sums))
        figures = tally.figures()
        if tally.confident:
            self.temperatures, errors = calibrated(found)
            figures["calibration_error_scaled"] = sum(errors) / len(errors)
        return figures

    @torch.no_grad()
    def _held_out_places(self) -> list[Places]:
        """Returns this process's held-out rows, compared. They are the same every time."""
        accelerator, rows = self.accelerator, self.plan.held_out
        comparison: Comparison = accelerator.unwrap_model(self.comparison)
        comparison.eval()
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.plan.seed)).tolist()
        mine = order[: self.plan.held_out_rows][accelerator.process_index :: accelerator.num_processes]
        size = self.config.micro_batch or max(1, self.config.batch_size // accelerator.num_processes)
        generator = torch.Generator().manual_seed(_mixed(self.plan.seed, 0, accelerator.process_index))
        found = []
        for start in range(0, len(mine), size):
            part = rows.batch(mine[start : start + size]).to(accelerator.device)
            with self._autocast():
                # Not called as a module: a divided one would gather its weights, each process for as many parts.
                found.append(comparison.places(part, self.target(part), self.head.anchors(part, generator)))
        comparison.train()
        return found

    def _stop(self, step: int, value: float, norm: float) -> None:
        numbers = self.rows.numbers(step, self.accelerator.process_index, self.accelerator.num_processes)
        good = newest_checkpoint(self.checkpoints)
        kept = f"the last good checkpoint is {good}" if good is not None else "there is no checkpoint yet"
        what = f"the loss is {value}" if not math.isfinite(value) else f"the gradient's norm is {norm}"
        raise DivergedError(
            f"{what} in step {step + 1}, on rows {numbers} ({self.rows.describe(numbers)}): {kept}; lower fit.lr, or "
            f"look at that text"
        )

    def _save(self) -> None:
        with undivided(self.comparison):
            head = self.head.state_dict()
        optimizers = [gathered(optimizer.state_dict()) for optimizer in self.optimizers]
        if self.accelerator.is_main_process:
            known = {"step": self.done, "evaluated": self.evaluated, "best": self.best, "precision": self.precision}
            save_checkpoint(self.checkpoints, self.done, {**known, "head": head, "optimizers": optimizers})

    def _restored(self) -> dict[str, Any] | None:
        """The newest checkpoint's state, its weights loaded; None without one."""
        path = newest_checkpoint(self.checkpoints)
        if path is None:
            return None
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.head.load_state_dict(state["head"])
        self.done, self.evaluated, self.best = state["step"], state["evaluated"], state["best"]
        return state

    def _write(self, name: str, figures: Mapping[str, float] | None = None) -> None:
        """Write the present weights as a drafter reads them."""

        def write(folder: Path) -> None:
            self.head.save(folder, self.plan.facts)
            known = {**self.plan.facts, "step": self.done, "figures": dict(figures or {}), "scaled_output": True}
            known["mixed_precision"] = self.precision
            if self.temperatures is not None:
                known["confidence_temperatures"] = self.temperatures
            (folder / "training.json").write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")

        write_folder(self.plan.folder / name, write)

    def _log(self, figures: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            keep_row(self.plan.folder / LOG, {"step": self.done, **figures})

    def _cut_log(self) -> None:
        """Leave out what an interrupted attempt has logged after its last checkpoint."""
        if self.accelerator.is_main_process:
            path = self.plan.folder / LOG
            kept = [row for row in kept_rows(path) if row["step"] <= self.done]
            path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


def _interrupt_on_sigterm() -> Any:
    """Let SIGTERM, by which schedulers end jobs, do what Ctrl-C does; return the handler before it (main thread)."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, interrupt)


def _mixed(seed: int, step: int, rank: int) -> int:
    return (seed * 1_000_003 + step) * 4099 + rank


def _summed(accelerator: Accelerator, value: Tensor) -> Tensor:
    """The sum over all processes."""
    if accelerator.num_processes == 1:
        return value
    found = accelerator.reduce(value, reduction="sum")
    assert isinstance(found, Tensor)
    return found
