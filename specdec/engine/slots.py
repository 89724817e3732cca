"""Per-slot state of the running requests, on the device and mirrored on the host."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.random import request_key
from specdec.requests import SamplingParams
from specdec.sampling import SamplingTensors


class Slots:
    """State of every slot; row b of a batch is slot b.

    The tensors are updated in place, so views of them stay current. ``first(n)`` gives such a view of the first
    n slots, which is what a round works on: slots in it that are not ``active`` are dead rows.

    Attributes:
        roots: The token of the root: the last of the sequence.
        lengths: Tokens whose keys and values are in the target's cache, hence the root's position.
        active: Slots that decode in this round.
        drafting: Active slots whose request wants speculation.
        max_depth: No node may be deeper: what is left of the output and of the cache.
        keys: Random key of the request.
        rounds: Rounds of the request so far.
        sampling: Sampling parameters.
        processors: Logits processors of each slot's request.
        host_tokens: Int[slot position] on the host: the sequence, root included.
        host_lengths, host_active, host_drafting, host_max_depth: The same as on the device.
    """

    def __init__(self, max_batch_size: int, max_length: int, vocab_size: int, device: torch.device):
        def tensor(value: int | float, dtype: torch.dtype) -> Tensor:
            return torch.full((max_batch_size,), value, dtype=dtype, device=device)

        self.device = device
        self.vocab_size = vocab_size
        self.roots: Int[Tensor, " batch"] = tensor(0, torch.long)
        self.lengths: Int[Tensor, " batch"] = tensor(0, torch.long)
        self.active: Bool[Tensor, " batch"] = tensor(0, torch.bool)
        self.drafting: Bool[Tensor, " batch"] = tensor(0, torch.bool)
        self.max_depth: Int[Tensor, " batch"] = tensor(0, torch.long)
        self.keys: Int[Tensor, " batch"] = tensor(0, torch.long)
        self.rounds: Int[Tensor, " batch"] = tensor(0, torch.long)
        self.temperature: Float[Tensor, " batch"] = tensor(0, torch.float32)
        self.top_k: Int[Tensor, " batch"] = tensor(0, torch.long)
        self.top_p: Float[Tensor, " batch"] = tensor(1, torch.float32)
        self.min_p: Float[Tensor, " batch"] = tensor(0, torch.float32)
        self.repetition_penalty: Float[Tensor, " batch"] = tensor(1, torch.float32)
        self.seen: Bool[Tensor, "batch vocab"] | None = None
        self.host_tokens = np.zeros((max_batch_size, max_length + 1), dtype=np.int32)
        self.host_lengths = np.zeros(max_batch_size, dtype=np.int64)
        self.host_active = np.zeros(max_batch_size, dtype=bool)
        self.host_drafting = np.zeros(max_batch_size, dtype=bool)
        self.host_max_depth = np.zeros(max_batch_size, dtype=np.int64)
        self.processors: list[tuple[Callable[..., Any], ...]] = [()] * max_batch_size
        self._params: list[SamplingParams | None] = [None] * max_batch_size
        self.sampling = self._sampling()

    def __len__(self) -> int:
        return len(self.host_lengths)

    def first(self, n: int) -> "Slots":
        """A view of the first n slots that shares their storage."""
        view = object.__new__(Slots)
        for name, value in vars(self).items():
            vars(view)[name] = value[:n] if isinstance(value, (Tensor, np.ndarray, list)) else value
        view.sampling = view._sampling()
        return view

    def admit(self, slot: int, prompt_ids: list[int], sampling: SamplingParams, *, speculate: bool) -> None:
        """Give a slot to a request (seeded), with nothing in its cache yet."""
        assert sampling.seed is not None and sampling.stream is not None
        self._params[slot] = sampling
        self.processors[slot] = sampling.processors
        self.host_tokens[slot, : len(prompt_ids)] = prompt_ids
        self.host_lengths[slot] = 0
        self.host_drafting[slot] = speculate
        self.roots[slot] = prompt_ids[0]
        self.lengths[slot] = 0
        self.drafting[slot] = False  # becomes true with `activate`
        self.keys[slot] = request_key(sampling.seed, sampling.stream)
        self.rounds[slot] = 0
        self.temperature[slot] = 0.0 if sampling.greedy else sampling.temperature
        self.top_k[slot] = 0 if sampling.greedy else sampling.top_k
        self.top_p[slot] = 1.0 if sampling.greedy else sampling.top_p
        self.min_p[slot] = 0.0 if sampling.greedy else sampling.min_p
        self.repetition_penalty[slot] = sampling.repetition_penalty
        if sampling.repetition_penalty != 1.0 and self.seen is None:
            self.seen = torch.zeros(len(self), self.vocab_size, dtype=torch.bool, device=self.device)
        if self.seen is not None:
            self.seen[slot] = False
            self.seen[slot, torch.tensor(prompt_ids, device=self.device)] = True

    def advance(self, slot: int, length: int) -> None:
        """The cache holds ``length`` tokens of the slot's prompt."""
        self.host_lengths[slot] = length
        self.lengths[slot] = length

    def activate(self, slot: int, root: int) -> None:
        """The prompt is prefilled but for its last token, the root: the slot decodes from the next round on."""
        self.host_active[slot] = True
        self.roots[slot] = root
        self.active[slot] = True
        self.drafting[slot] = bool(self.host_drafting[slot])

    def release(self, slot: int) -> None:
        """The request in the slot has ended."""
        self._params[slot] = None
        self.processors[slot] = ()
        self.host_active[slot] = False
        self.host_drafting[slot] = False
        self.host_lengths[slot] = 0
        self.active[slot] = False
        self.drafting[slot] = False
        self.lengths[slot] = 0
        self.temperature[slot] = 0.0
        self.top_k[slot] = 0
        self.top_p[slot] = 1.0
        self.min_p[slot] = 0.0
        self.repetition_penalty[slot] = 1.0
        if self.seen is not None and not any(
            params is not None and params.repetition_penalty != 1.0 for params in self._params
        ):
            self.seen = None

    def _sampling(self) -> SamplingTensors:
        running = [params for params in self._params if params is not None]
        sampled = [params for params in running if not params.greedy]
        return SamplingTensors(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seen=self.seen,
            any_greedy=len(sampled) < len(self._params),
            any_sampled=bool(sampled),
            any_filtered=any(params.top_k > 0 or params.top_p < 1 for params in sampled),
            any_min_p=any(params.min_p > 0 for params in sampled),
        )
