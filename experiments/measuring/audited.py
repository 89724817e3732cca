"""Outputs of a decoder that is audited, block by block, kept in a file from which an audit goes on."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.contenders.base import OtherEngine
from specdec.checks.betting import Question, Wealth
from specdec.checks.telling import Telling
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams

SAMPLES = "samples.jsonl"
"""A line per block: the prompt's number, and the outputs."""
_NEVER = math.log(1e-12)
Subject = Callable[[Sequence[int], SamplingParams, Sequence[int]], list[list[int]]]
"""From a prompt, its sampling and the streams to one output per stream, as token ids."""


def of_engine(engine: Engine | OtherEngine, size: int) -> Subject:
    """An engine in batches of ``size``.

    Raises (when called):
        ValueError: A request fails, or the tokens are not the engine's own.
    """

    def outputs(prompt: Sequence[int], sampling: SamplingParams, streams: Sequence[int]) -> list[list[int]]:
        found: list[list[int]] = []
        for first in range(0, len(streams), size):
            asked = [replace(sampling, stream=stream) for stream in streams[first : first + size]]
            done = engine.generate([list(prompt)] * len(asked), asked)
            for each in done:
                if each.error is not None:
                    raise ValueError(f"a request failed: {each.error}")
            found += [list(each.token_ids) for each in done]
        if not getattr(engine, "tells_tokens", True):
            raise ValueError(
                "the server returns no token ids, and an audit cannot be made of text, which has several spellings: "
                "vLLM tells them with '+contenders.openai.extra={return_token_ids:true}'"
            )
        return found

    return outputs


def of_function(function: Callable[..., Any], name: str) -> Subject:
    """A function ``generate(prompt_ids, sampling, n)`` that returns n lists of new token ids.

    It is called with a seed of its own for every block.
    """

    def outputs(prompt: Sequence[int], sampling: SamplingParams, streams: Sequence[int]) -> list[list[int]]:
        given = replace(sampling, seed=((sampling.seed or 0) << 32) + streams[0])
        found = function(list(prompt), given, len(streams))
        try:
            rows = [[int(token) for token in row] for row in found]
        except (TypeError, ValueError):
            rows = []
        if len(rows) != len(streams):
            raise ValueError(
                f"function={name} returned {type(found).__name__} where {len(streams)} outputs were asked for: "
                f"return a list of n lists of new token ids"
            )
        return rows

    return outputs


@dataclass
class Gathered:
    """The outputs of an audit so far, and the bets on them.

    Attributes:
        blocks: Blocks of outputs so far, over all prompts.
        tokens: Tokens that the subject has returned.
    """

    question: Question
    prompts: Sequence[Telling]
    vocab: int
    ends: frozenset[int] = frozenset()
    blocks: int = 0
    tokens: int = 0
    wealth: Wealth = field(init=False)

    def __post_init__(self) -> None:
        self.wealth = Wealth(self.question)

    @property
    def alarm(self) -> bool:
        return bool(self.wealth.alarm[0])

    def add(self, outputs: Sequence[Sequence[int]]) -> None:
        """Take the next block.

        Raises:
            ValueError: An output cannot be one of the model's.
        """
        prompt = self.blocks % len(self.prompts)
        cells = self.prompts[prompt].cells
        for output in outputs:
            wrong = [token for token in output if not 0 <= token < self.vocab]
            if wrong:
                raise ValueError(
                    f"the subject returned token {wrong[0]}, and the target has {self.vocab} tokens: it has another "
                    f"tokenizer or another model; give both the same"
                )
            if len(output) < cells.horizon and not self.ends.intersection(output[-1:]):
                raise ValueError(
                    f"the subject returned {len(output)} tokens where {cells.horizon} are needed, and none that ends "
                    f"an output: return new tokens only, with the end of text, and do not cut them"
                )
        likely = self.question.laws[prompt][cells.cell(outputs[0])]
        if all(list(each) == list(outputs[0]) for each in outputs) and len(outputs) * math.log(likely + 1e-99) < _NEVER:
            raise ValueError(
                f"the subject returned one and the same output {len(outputs)} times, which has a probability of "
                f"{likely:.2g} each time: it ignores the temperature, or the seed that every request has of its own"
            )
        counts = np.bincount([cells.cell(output) for output in outputs], minlength=cells.count)
        self.wealth.advance(prompt, counts[None])
        self.blocks += 1
        self.tokens += sum(map(len, outputs))

    def gather(
        self, subject: Subject, sampling: SamplingParams, folder: Path, *, most: int, advance: Callable[[str], None]
    ) -> str | None:
        """Go on until the alarm, or until every prompt has ``most`` blocks; what is in the file comes first.

        Returns:
            Why it ended early: ``"interrupted"`` or an error's sentence; None if it did not.
        """
        file, size = folder / SAMPLES, self.question.block
        before = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        whole = [line for line in before if line.endswith("\n")]  # a line may have been cut
        for line in whole:
            self.add(json.loads(line)["outputs"])
        with file.open("w", encoding="utf-8") as stream:
            stream.writelines(whole)
            stream.flush()
            try:
                while not self.alarm and self.blocks < most * len(self.prompts):
                    prompt = self.blocks % len(self.prompts)
                    streams = range(self.blocks * size, (self.blocks + 1) * size)
                    outputs = subject(self.prompts[prompt].ids, sampling, streams)
                    self.add(outputs)
                    stream.write(json.dumps({"prompt": prompt, "outputs": [list(each) for each in outputs]}) + "\n")
                    stream.flush()
                    advance(f"{self.blocks * size:,} outputs, log10 e = {self.wealth.log_e[0] / np.log(10):+.2f}")
            except KeyboardInterrupt:
                return "interrupted"
            except Exception as error:
                if not self.blocks:
                    file.unlink()  # nothing has been gathered
                    raise
                return " ".join(f"{type(error).__name__}: {error}".split())
        return None
