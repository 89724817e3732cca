"""llama.cpp on the same random weights, through llama-cpp-python, where it and ``gguf`` are installed."""

import importlib.util
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from drafters.round_costs import begin
from experiments.bench.engine.rounds import WARM_UP, play
from experiments.bench.engine.settings import Options
from experiments.bench.engine.steps import CAPTURED, Record, Setting, make_runner, measure_step
from experiments.bench.models import BUNDLED, make_target, repetitive
from experiments.bench.timing import Budget, timed
from experiments.contenders.workers.llama_cpp_worker import write_gguf
from experiments.measuring.forwards import captured_at_once
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target

NODES = (1, 5, 9, 16)
"""Tokens per forward."""


def why_not(target: Target, name: str) -> str | None:
    """Return why llama.cpp cannot be a peer here; None if it can."""
    missing = [package for package in ("llama_cpp", "gguf") if importlib.util.find_spec(package) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install llama-cpp-python gguf"
    if target.device.type != "cpu":
        return "it is a peer on CPUs only"
    return "the bundled model is not written as GGUF: take a random shape" if name == BUNDLED else None


def measure_llama_cpp(target: Target, name: str, context: int, options: Options, budget: Budget) -> list[Record]:
    """Time forwards and whole tokens of llama.cpp and of this engine, in turn, at every precision that both have.

    Returns:
        A record per precision and number of tokens: seconds of both, and ``ratio``, ours over theirs. ``nodes`` is 0
        for a whole plain token with everything around its forward.
    """
    full = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[target.dtype]
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        for theirs, ours in ((full, None), ("Q8_0", "int8"), ("Q4_0", "int4")):
            what = f"llama.cpp in {theirs}"
            if budget.left < 5:
                budget.skip(what, "no time left")
                continue
            try:
                made = target if ours is None else make_target(name, target.device, target.dtype, quantization=ours)
                records += _compared(target, made, theirs, Path(folder), context, options)
            except Exception as error:  # whatever fails in another engine is a line in the table
                budget.skip(what, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    return records


def _compared(
    target: Target, made: Target, precision: str, folder: Path, context: int, options: Options
) -> list[Record]:
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    state = target.model.state_dict()
    path = write_gguf(
        target.model.config.to_dict(), lambda name: state[name].float().numpy(), folder / f"{precision}.gguf", precision
    )
    threads, device = torch.get_num_threads(), target.device
    llama = Llama(
        str(path), n_ctx=context + options.tokens + 64, n_threads=threads, n_threads_batch=threads, logits_all=True,
        verbose=False,
    )  # fmt: skip
    prompt = repetitive(context, target.vocab_size)
    llama.eval(prompt)
    with torch.inference_mode():
        first = int(target.model(torch.tensor([prompt])).logits[0, -1].argmax())
    agrees = bool(np.argmax(llama.scores[context - 1]) == first)

    def record(nodes: int, ours: float, theirs: float) -> Record:
        figures = {"ours": ours, "theirs": theirs, "ratio": ours / theirs}
        return {"precision": precision, "nodes": nodes, **figures, "same_token": agrees}

    def evaluate(tokens: int) -> None:
        llama.n_tokens = context  # what was added is dropped: every call begins behind the same prefix
        llama.eval(prompt[:tokens])

    def token() -> None:
        evaluate(1)
        int(np.argmax(llama.scores[llama.n_tokens - 1]))

    records = []
    for nodes in NODES:
        setting = Setting(1, nodes, context)
        runner = make_runner(made, setting, nodes)
        forward = partial(timed, partial(evaluate, nodes), device, repeats=2 * options.repeats, limit=2.0)
        before = forward()["seconds"]
        ours = measure_step(runner, setting, repeats=options.repeats, limit=2.0)["seconds"]
        theirs = min(before, forward()["seconds"])
        records.append(record(nodes, ours, theirs))
    whole = timed(token, device, repeats=4 * options.repeats, limit=3.0)["seconds"]
    engine = Engine(made, max_length=context + WARM_UP + options.tokens + 1)
    sampling = SamplingParams(max_new_tokens=WARM_UP + options.tokens, ignore_eos=True)
    with captured_at_once(CAPTURED):
        begin(engine, [prompt], [sampling])
        play(engine, most=WARM_UP)
        records.append(record(0, median(each["seconds"] for each in play(engine)), whole))
    llama.close()
    return records
