"""An engine without a model: turns, schedulers, slots and pages are the real ones, and a cache's entry is its token.

The next token is a hash of what the cache holds in the row's place, so that a wrong page, a lost position or another
round number shows in the output. ``alone`` says what a request emits by itself, without any of this.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import torch

from specdec import Engine, Outcome, Paging, SamplingParams, Scheduler
from specdec.cache.pages import Placement
from specdec.engine.clock import StageTimer
from specdec.engine.intake import Intake
from specdec.engine.read_back import DeviceRound, ReadBack
from specdec.engine.round import Mode
from specdec.engine.running import RunningRequests
from specdec.engine.slot_table import SlotTable
from specdec.engine.turns import Turns
from specdec.random import request_key

VOCAB, STOP = 16, 0
CPU = torch.device("cpu")


def emitted(held: np.ndarray, root: int, key: int, number: int, room: int) -> list[int]:
    """Return the tokens of a round, at most ``room`` accepted ones and another; with key 0 they are greedy."""
    state = crc32(np.append(held, root).astype(np.int64).tobytes())
    tokens = []
    for index in range(1 + crc32(b"accepted", state + key + number) % (1 + max(room, 0))):
        draw = state if key == 0 else crc32(np.array([key, number, index]).tobytes(), state)
        tokens.append(crc32(b"token", draw) % VOCAB)
        state = crc32(np.array(tokens[-1]).tobytes(), state)
    return tokens


def alone(prompt: Sequence[int], sampling: SamplingParams, depth: int) -> tuple[int, ...]:
    """Return the output of a request that runs by itself."""
    tokens, most, number = list(prompt), sampling.max_new_tokens, 0
    key = 0 if sampling.greedy else request_key(sampling.seed, sampling.stream)
    while len(tokens) < len(prompt) + most and STOP not in tokens[len(prompt) :]:
        room = min(depth, len(prompt) + most - len(tokens) - 1)
        tokens += emitted(np.array(tokens[:-1]), tokens[-1], key, number, room)
        number += 1
    output = tokens[len(prompt) :]
    return tuple(output[: output.index(STOP) + 1] if STOP in output else output)


class Entries:
    """A cache whose entries are tokens."""

    bytes_per_position = 8
    states = None

    def __init__(self, paging: Paging, slots: int, *, max_length: int, nodes: int):
        self.max_length, self.positions, self._size = max_length, max_length + nodes + 1, paging.page_size
        ahead = 0 if paging.page_size is None else (paging.pages or 0) * paging.page_size
        self._own = ahead + np.arange(slots * self.positions).reshape(slots, -1)
        self._at = list(self._own)  # of every slot's positions, where they are
        self._stored = np.full(ahead + self._own.size, -1)

    def place(self, placement: Placement) -> None:
        slot = placement.slot
        if placement.source is not None:
            self.write(slot, 0, self.read(placement.source, placement.reused).copy())
        if self._size is not None:
            pages = np.array(placement.pages, dtype=np.int64)
            paged = (pages[:, None] * self._size + np.arange(self._size)).ravel()
            self._at[slot] = np.concatenate([paged, self._own[slot][len(paged) :]])[: self.positions]

    def vacate(self, slot: int) -> None:
        self._at[slot] = self._own[slot]

    def save(self, slot: int, count: int) -> list[torch.Tensor]:
        return [torch.from_numpy(self.read(slot, count).copy())]

    def load(self, slot: int, saved: Sequence[torch.Tensor]) -> None:
        self.write(slot, 0, saved[0].numpy())

    def clear(self, slot: int, *, start: int = 0, stop: int | None = None) -> None:
        self._stored[self._at[slot][start:stop]] = -1

    def read(self, slot: int, count: int) -> np.ndarray:
        return self._stored[self._at[slot][:count]]

    def write(self, slot: int, start: int, tokens: Any) -> None:
        where = self._at[slot][start : start + len(tokens)]
        self._stored[where] = tokens[: len(where)]


class Forwards:
    """Prefill is a copy."""

    device, joins = CPU, True

    def __init__(self, cache: Entries):
        self.cache = cache

    def run(self, batch: Any) -> Any:
        for slot, start, tokens in zip(batch.slots.tolist(), batch.lengths.tolist(), batch.tokens, strict=True):
            self.cache.write(slot, start, tokens.numpy())

    def run_together(self, batches: Any) -> list[Any]:
        return [self.run(each) for each in batches]

    def adapt(self, slot: int, number: int) -> None:
        assert number == 0, "no request asks for an adapter"


class HostRounds:
    """Rounds that look at the cache and nothing else."""

    def __init__(self, runner: Forwards, table: SlotTable, *, alone: bool):
        self.table, self.timer, self._alone = table, StageTimer(CPU, enabled=False), alone
        self.runner, self._cache = runner, runner.cache

    def begin(self, mode: Mode, batch: Any, requests: Any, look: Any = None, *, beside: Any, **more: Any) -> Any:
        if beside is not None:
            beside[1](self.runner.run_together(beside[0]))
        rows = zip(
            *(getattr(batch, name).tolist() for name in ("slots", "lengths", "roots", "keys", "rounds")), strict=True
        )
        temperature, width = batch.sampling.temperature.tolist(), mode.max_depth + 1
        tokens, path, counts = np.zeros((len(batch), width), dtype=np.int64), np.zeros((len(batch), width)), []
        for row, (slot, length, root, key, number) in enumerate(rows):
            room = min(mode.max_depth, int(batch.max_depth[row]))
            own = emitted(self._cache.read(slot, length), root, key if temperature[row] else 0, number, room)
            tokens[row, : len(own)], path[row], counts = own, root, [*counts, len(own) - 1]
            path[row, 1 : len(own)] = own[:-1]
            self._cache.write(slot, length, path[row, : len(own)])
        accepted, whole = np.array(counts), np.ones(len(batch), dtype=bool)
        last = torch.from_numpy(tokens[np.arange(len(batch)), accepted])
        outcome = Outcome(
            slots=batch.slots, starts=batch.lengths, tokens=torch.from_numpy(path).long(),
            counts=torch.from_numpy(accepted) + 1, next_tokens=last,
        )  # fmt: skip
        self.table.advance(batch, outcome)
        read = ReadBack(
            tokens=tokens, logprobs=np.zeros(tokens.shape), path=path, raw=None, num_accepted=accepted,
            expected_accepted=accepted, proposed_nodes=accepted, proposed_depth=accepted, valid=whole,
        )  # fmt: skip
        tree = SimpleNamespace(max_depth=mode.max_depth, width=width)
        begun = SimpleNamespace(
            tree=tree, read=read, outcome=None, alone=self._alone, batch=batch, requests=list(requests)
        )
        begun.rows_in = partial(DeviceRound.rows_in, begun)  # type: ignore[arg-type]
        return begun


class HostEngine(Engine):
    """The engine's requests, turns and deliveries, around such rounds."""

    def __init__(
        self, scheduler: Scheduler, paging: Paging, *, slots: int, max_length: int, prefill_chunk: int, depth: int,
        alone: bool = False,
    ):  # fmt: skip
        self.max_batch_size, self.max_length, self.prefill_chunk = slots, max_length, prefill_chunk
        self.paging = paging.filled_in(slots=slots, max_length=max_length)
        target: Any = SimpleNamespace(
            tokenizer=None, vocab_size=VOCAB, eos_token_ids=frozenset([STOP]), max_length=max_length, device=CPU,
            adapters=None,
        )  # fmt: skip
        self.target, self.drafter, self.session, self.on_round, self.on_turn = target, None, None, None, None
        cache = Entries(self.paging, slots, max_length=max_length, nodes=depth)
        self.runner: Any = Forwards(cache)
        self._slots = SlotTable(slots, max_length, VOCAB, CPU)
        self._rounds: Any = HostRounds(self.runner, self._slots, alone=alone)
        self._intake = Intake(target, max_length=max_length, can_speculate=True)
        self._inboxes, self._steps = {}, deque()
        self._running = RunningRequests(self.runner, self._slots, None, self.paging)
        plain = Mode.plain()
        self._turns = Turns(
            scheduler, plain, replace(plain, max_depth=depth, max_nodes=depth),
            self._running, self._rounds, prefill_chunk=prefill_chunk, reserve=self.paging.reserve,
        )  # fmt: skip
        self._waiting, self._closed = self._turns.waiting, False
        self._turn, self._busy, self._aborted = threading.RLock(), False, set()
