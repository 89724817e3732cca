"""specdec as a model of lm-eval: https://github.com/EleutherAI/lm-evaluation-harness.

The only file that imports lm-eval, which is an extra. Drafts matter to generated answers alone: tasks that compare the
likelihoods of given answers are refused.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
from rich.console import Console
from rich.progress import Progress

from experiments.results import metrics
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.types import Step

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_LIKELIHOODS = "{} compares likelihoods, which no draft changes: run it on the target, with lm-eval --model hf"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class SpecdecLM(TemplateLM):
    """An engine that answers lm-eval's requests; ``steps`` are all rounds of all answers.

    Args:
        max_new_tokens: Tokens of an answer, where a task does not say how many.
        template: More arguments of the chat template, such as ``enable_thinking``.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        speculate: bool = True,
        max_new_tokens: int = 256,
        seed: int = 0,
        template: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        if engine.target.tokenizer is None:
            raise ValueError(f"the target {engine.target.name} has no tokenizer: lm-eval's tasks are text")
        self.engine, self.speculate = engine, speculate
        self.max_new_tokens, self.seed, self.template = max_new_tokens, seed, dict(template or {})
        self.tokenizer: Any = engine.target.tokenizer
        self.steps: list[Step] = []
        self._requests = 0

    @property
    def mean_acceptance_length(self) -> float | None:
        """Emitted tokens per round of all answers; None without a round."""
        return metrics.mean_acceptance_length(metrics.of_steps(self.steps))

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Names the chat template in lm-eval's caches."""
        return self.engine.target.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text. A chat template has written the first special token already."""
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = begin is None or not string.startswith(begin)
        return self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, by the tokenizer's own template."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.template,
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The texts that continue the requests' contexts; one that leaves no room for the answer loses its beginning.

        Raises:
            ValueError: A task asks for a way of generating that there is not, or a decoding failed.
        """
        prompts, sampling = [], []
        for request in requests:
            context, options = request.args
            # The same numbers for a prompt's sample, plainly and with drafts.
            own = sampling_of(options, self.max_new_tokens, seed=self.seed, stream=self._requests + len(prompts))
            room = self.engine.max_length - own.max_new_tokens
            if room < 1:
                raise ValueError(
                    f"an answer of {own.max_new_tokens} tokens does not fit into engine.max_length="
                    f"{self.engine.max_length}: give generation={{max_gen_toks: …}} or a greater engine.max_length"
                )
            prompts.append(self.tok_encode(context)[-room:] or [self.prefix_token_id])
            sampling.append(own)
        texts: dict[int, list[str]] = {}
        stream = self.engine.stream(prompts, sampling, speculate=self.speculate)
        screen = Console(stderr=True)
        with Progress(console=screen, transient=True, disable=disable_tqdm or not screen.is_terminal) as shown:
            bar = shown.add_task("drafted" if self.speculate else "plain", total=len(prompts))
            for step in stream:
                texts.setdefault(step.request, []).append(step.text)
                self.steps.append(step)
                if step.finish_reason == "error":
                    raise ValueError(f"a decoding of {requests[0].task_name} failed: {step.error}")
                shown.advance(bar, step.finish_reason is not None)
        self._requests += len(prompts)
        return ["".join(texts[number]) for number in sorted(texts)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        raise ValueError(_LIKELIHOODS.format(requests[0].task_name))

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        raise ValueError(_LIKELIHOODS.format("a task"))


def evaluate(model: SpecdecLM, *, tasks: Sequence[str], include: str | None, seed: int, **options: Any) -> Any:
    """lm-eval's results of a model, with the scores of single documents; ``include`` is a folder with more tasks.

    Raises:
        ValueError: There is no such task, or it runs programs, and nobody has allowed that.
    """
    manager = TaskManager(include_path=include)
    for name in tasks:
        if name not in manager.all_tasks:
            near = get_close_matches(name, manager.all_tasks, n=1)
            hint = f"did you mean {near[0]}?" if near else "`lm-eval ls tasks` lists those that there are"
            raise ValueError(f"tasks: lm-eval has no task {name!r}: {hint}")
    try:
        return simple_evaluate(
            model,
            tasks=list(tasks),
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
            **{f"{whose}random_seed": seed for whose in ("", "numpy_", "torch_", "fewshot_")},
            **options,
        )
    except ValueError as error:
        if "confirm_run_unsafe_code" not in str(error):
            raise
        raise ValueError(
            f"tasks={','.join(tasks)} runs programs that the model writes: allow it with execute=true, in a container"
        ) from error


def sampling_of(options: Mapping[str, Any], max_new_tokens: int, *, seed: int, stream: int) -> SamplingParams:
    """The sampling that a task asks for in transformers' words; greedy unless it says otherwise.

    Raises:
        ValueError: It asks for something that our sampling has not, such as beams.
    """
    asked = {name: value for name, value in options.items() if value is not None}
    until, drawn = asked.pop("until", []), asked.pop("do_sample", None)
    lengths = [int(asked.pop(name)) for name in _LENGTHS if name in asked]
    own = {name: asked.pop(name) for name in _SAMPLING if name in asked}
    if asked:
        raise ValueError(
            f"a task generates with {', '.join(f'{name}={value}' for name, value in asked.items())}, which is not "
            f"known here: give generation={{…}} with {', '.join((*_SAMPLING, 'do_sample', 'until', _LENGTHS[0]))}"
        )
    if drawn is False:
        own["temperature"] = 0.0
    elif drawn:
        own.setdefault("temperature", 1.0)
    stop = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
    return SamplingParams(
        **own, stop=stop, max_new_tokens=next(iter(lengths), max_new_tokens), seed=seed, stream=stream
    )
