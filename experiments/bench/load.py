"""The cost of schedules and pages, and what they save: comparisons of one run, as ratios, four with a goal.

``turns``: the host's time from the beginning of a turn until the policy has planned it, over the whole turn of the
bundled target with a drafter, at 64 running requests, with none and with 1,000 waiting; policies take turns, turn by
turn. ``pages``: plain decoding of one request with shared rows, and with pages, over rows alone (``rows again``: the
noise). ``prefix``: the time to the first token behind 1,000 tokens that are in the cache, over that without.
``memory``: pages in use by 64 requests of mixed lengths, and those that each slot has for drafts, over slots for the
longest request. ``modes`` has no goal: admission by what is free and by the worst case, preemption by prefilling again
and by swapping, with memory for a third of the worst case.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch

from experiments.bench.models import BUNDLED, bundled_target, make_target, small_model, stdlib_prompts
from experiments.bench.options import option, read_options
from experiments.bench.timing import in_turns, missed, ms, show, where
from specdec.cache.pages import Paging
from specdec.engine import scheduler as policies
from specdec.engine.engine import Engine
from specdec.engine.scheduler import FirstCome, Scheduler, View, Work
from specdec.requests import SamplingParams
from verifiers import RejectionVerifier

PARTS = ("turns", "pages", "prefix", "memory", "modes")
ROWS, WAITING, PREFIX = 64, 1000, 1000
NAMES = [name for name in policies.__all__ if name not in ("Scheduler", "View", "Work")]


@dataclass(frozen=True)
class Options:
    """The command line."""

    only: tuple[str, ...] = option(PARTS, "parts to measure", choices=PARTS)
    repeats: int = option(8, "how often each comparison is repeated", least=2)
    inflate: str = option("110m", "the bundled target's cost where prefill is measured: 110m, 1b")


Row = dict[str, Any]


def row(what: str, ratio: float, least: float, most: float, goal: float | None, detail: str) -> Row:
    """Return a line of the table; the goal is the largest ratio that is wanted."""
    verdict = "" if goal is None else f"<= {goal:g} {'reached' if ratio <= goal else 'MISSED'}"
    figures = {"ratio": f"{ratio:.4f}", "min; max": f"{least:.4f}; {most:.4f}"}
    return {"what": what, **figures, "goal": missed(verdict, wrong="MISSED" in verdict), "": detail}


@dataclass
class Switched(Scheduler):
    """Plans as ``inner``, which may change from turn to turn."""

    inner: Scheduler = field(default_factory=FirstCome)

    def plan(self, view: View) -> Work:
        return self.inner.plan(view)


def measure_turns(options: Options) -> Iterator[Row]:
    """Yield a line per policy and number of waiting requests."""
    target, switched = bundled_target(), Switched()
    engine = Engine(
        target, small_model(target), RejectionVerifier(), max_batch_size=ROWS, max_length=640, scheduler=switched
    )
    prompts = stdlib_prompts(target, ROWS, tokens=32)
    planned = [0.0]
    engine.on_turn = lambda view, work: planned.append(time.perf_counter())
    limits = {"max_new_tokens": 500, "ignore_eos": True, "deadline": 10.0}

    def submit(number: int) -> None:
        sampling = SamplingParams(**limits, user=f"user {number % 10}")
        engine.submit(prompts[number % ROWS][:48], sampling)

    for number in range(ROWS):
        submit(number)
    kinds: dict[str, Any] = {name: getattr(policies, name) for name in NAMES}
    budgets = {name: [1024] if "budget" in signature(kind).parameters else [] for name, kind in kinds.items()}
    made = {name: kind(*budgets[name]).bind() for name, kind in kinds.items()}
    for waiting in (0, WAITING):
        for number in range(waiting):
            submit(number)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        for turn in range((2 + options.repeats) * len(made)):
            name = list(made)[turn % len(made)]
            switched.inner = made[name]
            begin = time.perf_counter()
            engine.step()
            found[name].append((planned[-1] - begin, time.perf_counter() - begin))
        for name, pairs in found.items():
            pairs = pairs[2:]
            shares = [plan / whole for plan, whole in pairs]
            plan, whole = statistics.median(plan for plan, _ in pairs), statistics.median(whole for _, whole in pairs)
            detail = f"{ms(plan)} of {ms(whole)} ms"
            yield row(f"turns: {name}, {waiting} waiting", plan / whole, min(shares), max(shares), 0.01, detail)
    engine.close()


def measure_pages(options: Options) -> Iterator[Row]:
    """Yield a line per layout beside rows, for plain decoding of one request."""
    target = bundled_target()
    (prompt,) = stdlib_prompts(target, 1, tokens=16)
    layouts = {
        "rows": None, "rows again": None, "rows, shared": Paging(shared=True), "pages of 16": Paging(page_size=16),
        "pages of 16, shared": Paging(page_size=16, shared=True),
    }  # fmt: skip
    engines = [Engine(target, max_length=512, cache=paging) for paging in layouts.values()]
    sampling = SamplingParams(max_new_tokens=128, ignore_eos=True)

    def play(engine: Engine) -> None:
        engine.forget()  # otherwise the prompt would be found
        engine.generate([prompt], sampling)

    times = in_turns([partial(play, engine) for engine in engines], 2 * options.repeats, warm_up=2)
    for name, own in zip(layouts, times, strict=True):
        if name != "rows":
            ratios = [mine / rows for mine, rows in zip(own, times[0], strict=True)]
            detail = f"{ms(statistics.median(own) / 128)} ms a token; median of paired ratios"
            goal = 1.02 if name == "rows, shared" else None
            yield row(f"pages: {name} / rows", statistics.median(ratios), min(ratios), max(ratios), goal, detail)


def measure_prefix(options: Options) -> Iterator[Row]:
    """Yield a line per layout and method: the first token behind a prefix in the cache, over one that is not there."""
    target = bundled_target(inflate=options.inflate)
    rng, most = np.random.default_rng(0), 16
    shared = rng.integers(1, 255, PREFIX).tolist()

    def first_token(engine: Engine) -> float:
        """Seconds until a request with this beginning and an end of its own has its first token."""
        begin = time.perf_counter()
        number = engine.submit([*shared, *rng.integers(1, 255, most).tolist()], SamplingParams(max_new_tokens=1))
        while not engine.step():
            pass
        engine.abort(number)
        return time.perf_counter() - begin

    for layout, paging in (("rows", Paging(shared=True)), ("pages of 16", Paging(page_size=16, shared=True))):
        for method, drafter in (("plain", None), ("small model", small_model(target))):
            rule = None if drafter is None else RejectionVerifier()
            engine = Engine(target, drafter, rule, max_batch_size=2, max_length=1024, cache=paging)
            pairs = []
            for _ in range(1 + max(2, options.repeats // 2)):
                engine.forget()
                without, found = first_token(engine), first_token(engine)
                pairs.append((found, without))
            found, without = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
            ratios = [mine / other for mine, other in pairs[1:]]
            detail = f"{ms(found)} and {ms(without)} ms to the first token"
            what = f"prefix of {PREFIX}: {method}, {layout}"
            yield row(what, found / without, min(ratios), max(ratios), 0.15, detail)


def mixed(requests: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Return requests whose lengths are spread as in chats: many are short, and few are long."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(64), 0.9, (requests, 2)), 4, 400).astype(int).tolist()
    return [
        (rng.integers(1, 255, prompt).tolist(), SamplingParams(max_new_tokens=output, ignore_eos=True))
        for prompt, output in lengths
    ]


def play_all(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> Mapping[str, float]:
    """Decode requests that come at once; return seconds, turns, mean rows and the most pages in use."""
    pages, rows = [0], list[int]()
    total = engine.paging.pages or 0
    engine.on_turn = lambda view, work: pages.append(total - (view.free_pages or 0))
    begin = time.perf_counter()
    for prompt, sampling in asked:
        engine.submit(prompt, sampling)
    while engine.unfinished:
        rows.append(len(engine.step()))
    return {
        "seconds": time.perf_counter() - begin,
        "pages": max(pages),
        "turns": len(rows),
        "mean": float(np.mean(rows)),
    }


def measure_memory(options: Options) -> Iterator[Row]:
    """Yield the share of slots' memory that pages take, with both ways of admission."""
    asked = mixed(ROWS)
    longest = max(len(prompt) + sampling.max_new_tokens for prompt, sampling in asked)
    target = make_target("tiny", torch.device("cpu"), torch.float32)
    for name, reserve in (("what is free", 0.0), ("the worst case", 1.0)):
        engine = Engine(
            target,
            max_batch_size=ROWS,
            max_length=longest,
            cache=Paging(page_size=16, reserve=reserve),
            scheduler=FirstCome(),
        )
        found = play_all(engine, asked)
        beside = engine.runner.cache.tensors[0].shape[1] - (engine.paging.pages or 0)  # every slot's own few pages
        share = 16 * (found["pages"] + beside) / (ROWS * longest)
        detail = f"at most {16 * found['pages']:.0f} + {16 * beside} positions; slots of {longest}: {ROWS * longest}"
        yield row(f"memory: pages / slots, admitted by {name}", share, share, share, 0.5, detail)


def measure_modes(options: Options) -> Iterator[Row]:
    """Yield a line per way of admission and of preemption, over the worst case's reservation."""
    asked, target = mixed(32, seed=1), make_target(BUNDLED, torch.device("cpu"), torch.float32)
    longest = max(len(prompt) + sampling.max_new_tokens for prompt, sampling in asked)
    pages = max(16 * -(-longest // 16) // 3, -(-longest // 16))
    modes = {
        f"{admission}, {preemption}": Paging(page_size=16, pages=pages, reserve=reserve, swap=swap)
        for admission, reserve in (("reserve", 1.0), ("half", 0.5), ("pack", 0.0))
        for preemption, swap in (("recompute", 0), ("swap", 2**30))
        if not (reserve == 1.0 and swap)
    }
    first = None
    for name, paging in modes.items():
        engine = Engine(target, max_batch_size=16, max_length=longest, cache=paging)
        play_all(engine, asked[:4])
        before = vars(engine.page_counts).copy()
        found = play_all(engine, asked)
        did = {key: value - before[key] for key, value in vars(engine.page_counts).items()}
        first = first or found["seconds"]
        detail = (
            f"{found['turns']} turns of {found['mean']:.1f} rows; {did['preempted']} preempted, "
            f"{did['recomputed']} tokens prefilled again, "
            f"{did['swapped_out']} swapped out and back in {ms(did['swap_seconds'])} ms"
        )
        ratio = found["seconds"] / first
        yield row(f"modes: {name} / reserve", ratio, ratio, ratio, None, detail)


MEASURES: dict[str, Callable[[Options], Iterator[Row]]] = {
    "turns": measure_turns,
    "pages": measure_pages,
    "prefix": measure_prefix,
    "memory": measure_memory,
    "modes": measure_modes,
}


def main() -> None:
    """Measure the parts and print one table."""
    options = read_options(Options, __doc__)
    rows = []
    for part in options.only:
        for each in MEASURES[part](options):
            rows.append(each)
            print(f"{each['what']}: {each['ratio']} ({each['min; max']}) {each['goal']} {each['']}", flush=True)
    show(where(), rows)
