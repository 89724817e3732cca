"""What a head does in the engine: it drafts for held-out prompts while it is trained.

Teacher-forced figures overstate: the head was given the text's tokens. The mean acceptance length of served drafts is
what the finished drafter will have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafters.heads.training import TrainedHead
from experiments.results import metrics
from experiments.results.statistics import Bootstrap, ratio_of_sums
from experiments.tracing.along import expected_rounds, refusal
from experiments.training.data.document import Document
from specdec.arguments import whole
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target
from verifiers.rejection import RejectionVerifier


@dataclass(frozen=True, kw_only=True)
class ServedConfig:
    """How the head is tried in the engine.

    Attributes:
        prompts: Held-out prompts; 0 for no trial. Lengths of prompts differ by some 0.4, so that 32 give ± 0.15.
        prompt_tokens: Tokens of a document that a prompt has at most. A conversation's prompt ends where the assistant
            first speaks, and is left out if it is longer.
        temperatures: At which it is tried. The best checkpoint has the highest mean over them.
    """

    prompts: int = 32
    prompt_tokens: int = 64
    max_new_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch_size: int = 8

    def __post_init__(self) -> None:
        for name, least in (("prompts", 0), ("prompt_tokens", 2), ("max_new_tokens", 1), ("batch_size", 1)):
            whole(f"served.{name}", getattr(self, name), least=least)
        if self.prompts and not self.temperatures:
            raise ValueError("served.temperatures=[]: give at least one, or served.prompts=0 for no trial")


def prompts_of(documents: Sequence[Document], config: ServedConfig) -> list[list[int]]:
    """Prompts from held-out documents: one each, in an order that is always the same, until there are enough.

    Raises:
        ValueError: No document has a prompt.
    """
    generator, found = torch.Generator().manual_seed(0), list[list[int]]()
    for index in torch.randperm(len(documents) if config.prompts else 0, generator=generator).tolist():
        document = documents[index]
        prompt = document.prompt
        if bool(document.supervised.all()):  # plain text: from the middle, because files begin alike
            room = len(document.tokens) - config.prompt_tokens
            start = int(torch.randint(room, (1,), generator=generator)) if room > 0 else 0
            prompt = document.tokens[start : start + config.prompt_tokens].tolist()
        if 2 <= len(prompt) <= config.prompt_tokens:
            found.append(prompt)
        if len(found) == config.prompts:
            break
    if config.prompts and not found:
        raise ValueError(
            f"no held-out document has a prompt of at most {config.prompt_tokens} tokens: raise served.prompt_tokens, "
            f"or give served.prompts=0"
        )
    return found


def served(
    head: TrainedHead, target: Target, prompts: Sequence[Sequence[int]], config: ServedConfig, *, seed: int
) -> dict[str, float]:
    """Draft with the head's present weights, and return the figures of it by name.

    ``served_length`` is the mean acceptance length over the temperatures; ``served_length/T=0`` that of one of them,
    between ``served_length/T=0/low`` and ``…/high`` (95 %, over prompts, if there are several). ``expected_length`` has
    the tokens per expected round of texts of the target at temperatures above 0; absent without a closed form.
    """
    was_training = head.training
    head.eval()
    rule, drafter, bootstrap = RejectionVerifier(), head.drafter(), Bootstrap(resamples=1000)
    longest = max(len(prompt) for prompt in prompts) + config.max_new_tokens + head.depths + 1
    sizes: Any = {"max_batch_size": min(config.batch_size, len(prompts)), "max_length": min(longest, target.max_length)}
    figures, served_lengths, expected_lengths = dict[str, float](), list[float](), list[float]()

    def length(name: str, tokens: Sequence[int], rounds: Sequence[float]) -> float:
        figures[name] = sum(tokens) / sum(rounds)
        if (bounds := bootstrap.interval(ratio_of_sums, [tokens, rounds])) is not None:
            figures.update({f"{name}/low": bounds[0], f"{name}/high": bounds[1]})
        return figures[name]

    # The model's own forwards: packed weights would round differently, and the training goes on with this target.
    exact = torch.autocast(target.device.type, enabled=False)
    with Engine(target, drafter, rule, optimize=False, **sizes) as engine, exact:
        for temperature in map(float, config.temperatures):
            wanted: Any = {"max_new_tokens": config.max_new_tokens, "seed": seed, "ignore_eos": True}
            sampling = SamplingParams(temperature=temperature, **wanted)
            apart = [metrics.of_steps(completion.steps) for completion in engine.generate(prompts, sampling)]
            emitted, counts = [len(own) + int(own.accepted.sum()) for own in apart], [max(1, len(own)) for own in apart]
            served_lengths.append(length(f"served_length/T={temperature:g}", emitted, counts))
            if sampling.greedy:
                expected_lengths.append(served_lengths[-1])  # nothing is drawn
            elif refusal(drafter, rule, sampling) is None:
                plainly = engine.generate(prompts, sampling, speculate=False)
                texts = [(each.prompt_ids, each.token_ids) for each in plainly]
                rounds = expected_rounds(target, drafter, {"": rule}, texts, sampling, optimize=False)[""]
                tokens = [len(output) for _, output in texts]
                expected_lengths.append(length(f"expected_length/T={temperature:g}", tokens, rounds))
    figures["served_length"] = sum(served_lengths) / len(served_lengths)
    if len(expected_lengths) == len(served_lengths):
        figures["expected_length"] = sum(expected_lengths) / len(expected_lengths)
    head.train(was_training)
    return figures
