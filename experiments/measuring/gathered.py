"""The outputs of an audit, step by step: judged as they come, and kept in a file from which the audit goes on."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.contenders.base import OtherEngine
from experiments.results.origin import keep_row, kept_rows
from experiments.results.records import OTHERWISE
from specdec.checks.betting import Question, Wealth, p_value
from specdec.checks.telling import Telling
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.types import Completion

Subject = Callable[[Sequence[Sequence[int]], SamplingParams, Sequence[int]], list[list[int]]]
"""From prompts, their sampling and a stream for each to one output for each, as token ids."""


def of_engine(engine: Engine | OtherEngine, size: int) -> Subject:
    """An engine in batches of ``size``; a request that fails, or tokens that are not its own, are a ``ValueError``."""

    def outputs(prompts: Sequence[Sequence[int]], sampling: SamplingParams, streams: Sequence[int]) -> list[list[int]]:
        done: list[Completion] = []
        asked = [replace(sampling, stream=stream) for stream in streams]
        for part in (slice(first, first + size) for first in range(0, len(streams), size)):
            done += engine.generate([list(prompt) for prompt in prompts[part]], asked[part])
            if failed := next((each for each in done if each.error is not None), None):
                raise ValueError(f"a request failed: {failed.error}")
        if not (getattr(engine, "tells_tokens", True) and getattr(engine, "exactness", "") != OTHERWISE):
            raise ValueError(
                "the tokens cannot be judged: a server has to return token ids (vLLM, SGLang and llama.cpp do; others: "
                "'+contenders.openai.extra={return_token_ids:true}'), an engine apart needs target.dtype=float32"
            )
        return [list(completion.token_ids) for completion in done]

    return outputs


def of_function(function: Callable[..., Any], name: str) -> Subject:
    """A function ``generate(prompt_ids, sampling, n)`` that returns n lists of token ids; every block has a seed."""
    try:
        inspect.signature(function).bind([], SamplingParams(), 1)
    except TypeError as error:
        raise ValueError(f"function={name}: {error}; it is called with prompt_ids, sampling and n") from error

    def outputs(prompts: Sequence[Sequence[int]], sampling: SamplingParams, streams: Sequence[int]) -> list[list[int]]:
        given = replace(sampling, seed=((sampling.seed or 0) << 32) + streams[0])
        found = function(list(prompts[0]), given, len(streams))
        try:
            rows = [[int(token) for token in row] for row in found]
        except (TypeError, ValueError):
            rows = []
        if len(rows) != len(streams):
            asked = f"{type(found).__name__} where {len(streams)} outputs were asked for"
            raise ValueError(f"function={name} returned {asked}: return a list of n lists of new token ids")
        return rows

    return outputs


SAMPLES = "samples.jsonl"
"""A line per block: what it asked for, and the outputs."""
NEVER = 1e-12
"""Probability below which what an honest subject did is taken for a fault of its settings."""


@dataclass
class Audit:
    """Blocks of outputs of one prompt each (``order``), of which ``horizon`` tokens are held against their law.

    ``done`` blocks have been judged, of ``tokens`` tokens.
    """

    subject: Subject
    sampling: SamplingParams
    prompts: Sequence[tuple[int, ...]]
    order: Sequence[int]
    block: int
    horizon: int
    vocab: int
    ends: frozenset[int]
    question: Question
    telling: Sequence[Telling]
    done: int = 0
    tokens: int = 0
    impossible: int = 0

    def __post_init__(self) -> None:
        self.wealth = Wealth(self.question)
        self._blocks: set[Any] = set()

    @property
    def alarm(self) -> bool:
        return bool(self.wealth.alarm[0])

    @property
    def outputs(self) -> int:
        return self.done * self.block

    @property
    def p_value(self) -> float | None:
        """The fixed-sample test's, after the last block; None before."""
        if self.done < len(self.order):
            return None
        return p_value(self.question, [counts[0] for counts in self.wealth.seen])

    def gather(self, folder: Path, *, advance: Callable[[str], None]) -> str | None:
        """Go on until the alarm or the last block; what is in the file comes first.

        Returns why it ended early: ``"interrupted"`` or an error's sentence; None if it did not.
        """
        file = folder / SAMPLES
        for row in kept_rows(file):
            self._judge(row)
        try:
            while not self.alarm and self.done < len(self.order):
                prompt = self.order[self.done]
                ids, streams = list(self.prompts[prompt]), range(self.outputs, self.outputs + self.block)
                outputs = self.subject([ids] * self.block, self.sampling, streams)
                row = {"prompt": prompt, "ids": ids, "outputs": outputs}
                self._judge(row)
                keep_row(file, row)
                advance(f"{self.outputs:,} outputs, log10 e = {self.wealth.log_e[0] / np.log(10):+.2f}")
        except KeyboardInterrupt:
            return "interrupted"
        except Exception as error:
            if not self.done:
                raise
            kind = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: "
            return " ".join(f"{kind}{error}".split())
        return None

    def _judge(self, row: dict[str, Any]) -> None:
        """Count a block, or refuse outputs that cannot be the model's or that audit's."""
        prompt = self.order[self.done]
        if (row["prompt"], row["ids"]) != (prompt, list(self.prompts[prompt])):
            raise ValueError(
                f"{SAMPLES} has outputs of other prompts than are planned now, as another machine or version may plan "
                f"them: begin anew with another out"
            )
        for output in row["outputs"]:
            if wrong := [token for token in output if not 0 <= token < self.vocab]:
                raise ValueError(
                    f"the subject returned token {wrong[0]}, and the target has {self.vocab} tokens: it has another "
                    f"tokenizer or another model; give both the same"
                )
            if len(output) < self.horizon and not self.ends.intersection(output[-1:]):
                raise ValueError(
                    f"the subject returned {len(output)} tokens where {self.horizon} are needed, and none that ends "
                    f"an output: return new tokens only, with the end of text, and do not cut them"
                )
        outputs = [tuple(output[: self.horizon]) for output in row["outputs"]]
        cells, law = self.telling[prompt].cells, self.question.laws[prompt]
        drawn = [cells.cell(output) for output in outputs]
        self._check_noise((prompt, *outputs), float(law[drawn].prod()))
        counts = np.bincount(drawn, minlength=cells.count)
        self.impossible += int(counts[law == 0].sum())
        self.wealth.advance(prompt, counts[None])
        self.tokens += sum(map(len, row["outputs"]))
        self.done += 1

    def _check_noise(self, block: tuple[Any, ...], odds: float) -> None:
        """Refuse outputs that are the same every time; ``odds`` is the probability of all of them."""
        same, again = len(set(block[1:])) == 1, block in self._blocks
        self._blocks.add(block)
        if (same or again) and odds < NEVER:
            often = f"one and the same output {self.block} times" if same else "an earlier block's outputs again"
            raise ValueError(
                f"the subject returned {often}, which has a probability of {odds:.2g}: it ignores the temperature, or "
                f"the seed that every request has of its own"
            )
