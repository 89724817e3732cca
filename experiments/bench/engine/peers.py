"""The engine beside transformers' ``generate``, in turn, on the same weights and prompts."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import CompileConfig

from drafters import NGramDrafter
from drafters.round_costs import now
from experiments.bench.engine.settings import Options
from experiments.bench.engine.steps import CAPTURED, Record
from experiments.bench.models import BUNDLED, make_target, repetitive, small_model, stdlib_prompts
from experiments.bench.timing import Budget
from experiments.contenders.hf import HfGenerate
from experiments.measuring.forwards import captured_at_once
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target
from verifiers import RejectionVerifier

Decode = Callable[[list[int]], Sequence[int]]
"""Decodes a prompt and returns what was emitted."""
Contest = tuple[str, Decode, Mapping[str, Decode]]
"""Kinds of decoding: our way, and others' ways of the same, by name."""


class TooLongError(Exception):
    """A peer took longer than it was given."""


def measure_peers(target: Target, name: str, context: int, options: Options, budget: Budget) -> list[Record]:
    """Compare with ``generate``: plain decoding of the target, and all methods on the bundled models.

    Only there do drafts mean something: random weights hardly ever accept any.

    Returns:
        A record per method and peer: ``ratio`` is the peer's time over ours, or ``error`` says why there is none.
    """
    records: list[Record] = []
    jobs = [(target, name, context)]
    if name != BUNDLED:
        jobs.append((make_target(BUNDLED, target.device, target.dtype), BUNDLED, 128))
    for each, called, length in jobs:
        prompts = [repetitive(length, each.vocab_size, row) for row in range(options.repeats)]
        if called == BUNDLED:
            prompts = stdlib_prompts(each, options.repeats, length)
        for contest in _contests(each, called, length, options):
            records += _held(contest, called, each, prompts, options, budget)
    return records


def _contests(target: Target, name: str, context: int, options: Options) -> Iterator[Contest]:
    max_length = min(target.max_length, 2 * context + options.tokens + 16)  # prompts may be twice as long
    sampling = SamplingParams(max_new_tokens=options.tokens, ignore_eos=True)

    def ours(*drafting: Any) -> Decode:
        engine = Engine(target, *drafting, max_length=max_length)
        return lambda prompt: engine.generate([prompt], sampling)[0].token_ids

    def theirs(assistant: str | None = None, num_tokens: int | None = None, **more: Any) -> Decode:
        dtype = str(target.dtype).removeprefix("torch.")
        other = HfGenerate(
            assistant=assistant, num_tokens=num_tokens, dtype=dtype, device=str(target.device), options=more
        )
        other.bind(target, max_batch_size=1, max_length=max_length)
        return lambda prompt: other.generate([prompt], [sampling])[0].token_ids

    ways = {"dynamic cache": theirs(), "static cache": theirs(cache_implementation="static", disable_compile=True)}
    if options.compile_seconds:
        everywhere = CompileConfig()
        everywhere._compile_all_devices = True  # pyright: ignore[reportAttributeAccessIssue] (else GPUs only)
        ways["static cache, compiled"] = theirs(cache_implementation="static", compile_config=everywhere)
    yield "plain", ours(), ways
    if name != BUNDLED:
        return
    lookup = ours(NGramDrafter(max_draft_tokens=8, branches=1), RejectionVerifier())
    yield "prompt lookup, 8 tokens", lookup, {"prompt_lookup_num_tokens": theirs(num_tokens=8)}
    small = ours(small_model(target, dtype=target.dtype), RejectionVerifier())
    yield "small model, 4 tokens", small, {"assistant_model": theirs("bundled/drafter", 4)}


def _held(
    contest: Contest, name: str, target: Target, prompts: list[list[int]], options: Options, budget: Budget
) -> list[Record]:
    """Return a record per peer: all warm up, then take turns on every prompt."""
    device, (method, ours, peers) = target.device, contest
    about = {"target": name, "method": method, "tokens": options.tokens}
    records: dict[str, Record] = {}
    sides: dict[str, Decode] = {"": ours}
    if budget.spent(f"peers: {method} of {name}"):
        return []
    with captured_at_once(CAPTURED):
        for _ in range(2):
            ours(prompts[0])
        expected = list(ours(prompts[0]))
        for peer, decode in peers.items():
            compiled = "compiled" in peer
            limit = float(options.compile_seconds if compiled else max(5.0, budget.left / 2))
            if compiled and budget.left < limit:
                budget.skip(f"peers: {peer}", "no time left to compile")
                continue
            try:
                with time_limit(limit):
                    decode(prompts[0])
                    got = list(decode(prompts[0]))
                sides[peer] = decode
                records[peer] = {**about, "peer": peer, "same_tokens": got == expected}
            except Exception as error:  # whatever fails in another engine is a line in the table
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"[:200]
                # A compiler wraps what interrupts it.
                if isinstance(error, TooLongError) or "TooLongError" in str(error):
                    reason = f"took longer than {limit:.0f} s"
                records[peer] = {**about, "peer": peer, "error": reason}
        for _ in range(3):  # compiling changes a model's attributes, after which ours packs and captures again
            ours(prompts[0])
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number, prompt in enumerate(prompts):
            if number and budget.left <= 0:
                break
            for side in list(sides)[:: 1 if number % 2 else -1]:
                start = now(device)
                sides[side](prompt)
                seconds[side].append(now(device) - start)
    own = seconds.pop("")
    for peer, times in seconds.items():
        ratios = [b / a for a, b in zip(own, times, strict=True)]
        means = {"seconds": sum(times) / len(times), "ours": sum(own) / len(own)}
        records[peer] |= {**means, "ratio": sum(times) / sum(own), "ratios": ratios}
    return list(records.values())


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TooLongError`` in the ``with`` block after so many seconds.

    It needs Unix's timer signal, which only the main thread gets; elsewhere there is no limit.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise TooLongError(f"after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
