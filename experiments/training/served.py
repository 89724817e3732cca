"""What a head does in the engine: it drafts for held-out prompts while it is trained.

Teacher-forced figures overstate: the head was given the text's tokens. The mean acceptance length of served drafts is
what the finished drafter will have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafters.heads.training import TrainedHead
from experiments.results import metrics
from experiments.results.statistics import Bootstrap, ratio_of_sums
from experiments.training.data.document import Document
from specdec.arguments import whole
from specdec.engine.engine import Engine
from specdec.interfaces import Verifier
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
        max_new_tokens: Tokens that are decoded for each.
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

    ``served_length`` is the mean acceptance length over the temperatures; ``served_length/T=0`` is that of one of them,
    between ``served_length/T=0/low`` and ``…/high`` (95 %, over prompts; absent with a single prompt).
    """
    was_training = head.training
    head.eval()
    rule: Verifier = RejectionVerifier()
    longest = max(len(prompt) for prompt in prompts) + config.max_new_tokens + head.depths + 1
    figures, lengths = dict[str, float](), []
    # The model's own forwards: packed weights would round differently, and the training goes on with this target.
    with Engine(
        target,
        head.drafter(),
        rule,
        max_batch_size=min(config.batch_size, len(prompts)),
        max_length=min(longest, target.max_length),
        optimize=False,
    ) as engine:
        for temperature in config.temperatures:
            sampling = SamplingParams(
                temperature=float(temperature), max_new_tokens=config.max_new_tokens, seed=seed, ignore_eos=True
            )
            with torch.autocast(target.device.type, enabled=False):
                done = engine.generate([list(prompt) for prompt in prompts], sampling)
            apart = [metrics.of_steps(completion.steps) for completion in done]
            rounds = metrics.of_steps(step for completion in done for step in completion.steps)
            length, name = metrics.mean_acceptance_length(rounds) or 1.0, f"served_length/T={temperature:g}"
            emitted, counts = [len(own) + own.accepted.sum() for own in apart], [max(1, len(own)) for own in apart]
            bounds = Bootstrap(resamples=1000).interval(ratio_of_sums, [emitted, counts])
            expected = metrics.expected_mean_acceptance_length(rounds)
            figures |= {name: length} | (
                {} if bounds is None else {f"{name}/low": bounds[0], f"{name}/high": bounds[1]}
            )
            if temperature > 0 and expected is not None:
                figures[f"served_expected_length/T={temperature:g}"] = expected
            # A drawn length is noisy; its expectation over the acceptance, given the drafts, less so.
            lengths.append(length if expected is None else expected)
    figures["served_length"] = sum(lengths) / len(lengths)
    head.train(was_training)
    return figures
