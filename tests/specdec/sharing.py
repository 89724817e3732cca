"""What every process of test_device_map.py runs under torchrun: it decodes, and notes what came out."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from drafters import MedusaDrafter, ModelDrafter, NGramDrafter
from specdec import Drafter, Engine, SamplingParams, Target
from specdec.engine import round as round_module
from specdec.target.loading import load
from specdec.target.parallel import Agreement
from tests.components import medusa_heads
from tests.models import tiny_model
from verifiers.rejection import RejectionVerifier

CASES = [("plain", 0.0), ("ngram", 0.0), ("model", 0.0), ("model", 0.9), ("medusa", 0.9)]
DISAGREEING = [("plain", 0.0), ("ngram", 0.0), ("model", 0.9)]
PROMPTS = [[1, 2, 3, 1, 2], [7], [9, 8] * 10]
DRAFTERS: dict[str, Callable[[Any], Drafter] | None] = {
    "plain": None,
    "ngram": lambda model: NGramDrafter(4, branches=2),
    "model": lambda model: ModelDrafter(tiny_model(seed=3), (2, 2)),
    "medusa": lambda model: MedusaDrafter(medusa_heads(tiny_model()), (2, 1)),
}


def outputs(model: Any, name: str, temperature: float, *, agree: bool = True, **options: Any) -> list[list[int]]:
    make = DRAFTERS[name]
    drafter = make(model) if make is not None else None
    rule = RejectionVerifier() if drafter is not None else None
    with Engine(Target(model), drafter, rule, max_batch_size=2, max_length=64, **options) as engine:
        if not agree:
            engine.runner.agreement = Agreement()
        sampling = SamplingParams(max_new_tokens=8, temperature=temperature, seed=5)
        return [list(done.token_ids) for done in engine.generate(PROMPTS, sampling)]


def every(model: Any, cases: Sequence[tuple[str, float]]) -> dict[str, list[list[int]]]:
    return {f"{name} at {temperature}": outputs(model, name, temperature) for name, temperature in cases}


def other_verdicts() -> None:
    """From now on, every round of this process decides for another next token."""
    for name in ("accept", "certain"):  # rounds with a rule, and plain greedy ones
        setattr(round_module, name, wrong(getattr(round_module, name)))


def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
    def deciding(*args: Any) -> Any:
        verdict = right(*args)
        return replace(verdict, next_token=(verdict.next_token + 1) % 64)

    return deciding


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    whole = load(str(folder), dtype="float32").model
    found: dict[str, Any] = {"alone": every(whole, CASES)} if rank == 0 else {}
    shared = load(str(folder), dtype="float32", tensor_parallel=True).model
    engine = Engine(Target(shared), max_length=32, recording="rounds")
    found["key heads"] = engine.runner.facts.layers[0].key_heads
    found["executor"] = type(engine.runner.executor).__name__
    found["recorded"] = engine._rounds.recorder.recordings is not None
    found["bytes"] = engine.runner.weights_read().bytes
    found["together"] = every(shared, CASES)
    found["in int8"] = [outputs(shared, name, 0.0, kv_cache="int8") for name in ("plain", "ngram")]
    try:
        Engine(Target(shared), max_length=32, invariant=True)
    except ValueError as error:
        found["invariant"] = str(error)
    if rank == 1:  # from here on, the processes are of different opinions
        DRAFTERS["model"] = lambda model: ModelDrafter(tiny_model(seed=4), (2, 2))
        DRAFTERS["ngram"] = lambda model: NGramDrafter(4, branches=2, max_ngram=1)
        other_verdicts()
    found["despite other opinions"] = every(shared, DISAGREEING)
    found["without agreement"] = outputs(shared, "plain", 0.0, agree=False)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    # gloo's threads outlive their group, and the interpreter aborts if it ends while one of them lets go of a tensor
    # (pytorch#190489). All is written.
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
