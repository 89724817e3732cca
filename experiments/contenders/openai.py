"""A server with an OpenAI-compatible completions endpoint: vLLM, SGLang, llama.cpp and others."""

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from experiments.contenders.base import OtherEngine
from specdec.requests import SamplingParams
from specdec.types import Completion

KEY = "OPENAI_API_KEY"
"""The environment variable that has the server's key, if it wants one."""
LLAMACPP = "llamacpp"
_FILTERS = {"top_k": 0, "min_p": 0.0}
PLAIN: dict[str, dict[str, Any]] = {
    "specdec": {"return_token_ids": True},
    "sglang": {"return_token_ids": True},
    "vllm": {"return_token_ids": True, "repetition_penalty": 1.0, **_FILTERS},
    LLAMACPP: {"return_tokens": True, "samplers": ["temperature", "top_k", "top_p", "min_p"], **_FILTERS},
}
"""Fields of every request by whose server it is (``owned_by`` of its models): with them it names its tokens, and draws
by the law that is asked for, whatever filters it has of its own. llama.cpp's would come before the temperature."""
BEYOND = ("top_k", "min_p", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "priority", "deadline")
"""Parameters of ``SamplingParams`` that are sent, under their own names, only where they differ from its defaults."""


class OpenAIServer(OtherEngine):
    """Sends every prompt as token ids to ``/completions``; the prompts of a batch are sent at once.

    The time of a call includes the way to the server and back, and whatever else the server does meanwhile. Tokens are
    those that the server names (``token_ids``), which the servers in ``PLAIN`` are asked to do; llama.cpp does so at an
    endpoint of its own, ``/completion``. From a server that names none, the text is tokenized again, which may differ
    by a token where a word can be spelled in several ways; an output that the server says has ended by itself then gets
    the target's EOS. Such outputs are not compared token for token. Servers report no rounds.

    Args:
        base_url: The address up to the version: ``http://127.0.0.1:8000/v1``.
        model: The model's name at the server; None takes the only one that it has.
        timeout: Seconds that one request may take.
        extra: More fields of every request, over those of ``PLAIN``.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str | None = None,
        timeout: float = 300.0,
        extra: Mapping[str, Any] | None = None,
    ):
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url={base_url!r}: give an address such as http://127.0.0.1:8000/v1")
        if wrong := {"n", "best_of", "stream"}.intersection(extra or {}):
            raise ValueError(
                f"extra has {min(wrong)!r}: a request is answered by one output, in one piece; leave it out"
            )
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for every request
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}
        self._client = httpx.Client(base_url=base_url.rstrip("/") + "/", timeout=timeout, headers=headers)
        self._address, self._owner, self._model, self._extra = base_url, "", model, dict(extra or {})

    def check(self) -> None:
        """Ask the server for its models; it has to be there and to know ours."""
        try:
            answer = self._client.get("models")
            answer.raise_for_status()
            models = {str(model["id"]): model for model in answer.json()["data"]}
        except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"no OpenAI-compatible server answers at {self._address}: start one, or give another base_url ({error})"
            ) from error
        served = list(models)
        if self._model is None and len(served) != 1:
            raise ValueError(f"the server at {self._address} has {len(served)} models: give model=…, of {served}")
        if self._model is not None and self._model not in served:
            raise ValueError(f"the server at {self._address} has no model {self._model!r}: choose among {served}")
        self._model = self._model or served[0]
        facts = models[self._model]
        self._owner = str(facts.get("owned_by"))
        longest = facts.get("max_model_len") or (facts.get("meta") or {}).get("n_ctx")  # llama.cpp: of one sequence
        self.max_length = min(self.max_length, int(longest or self.max_length))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], *, speculate: bool = True
    ) -> list[Completion]:
        """Send all prompts at once, and wait for all answers."""
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            return list(pool.map(self._one, prompts, sampling))

    def _one(self, prompt: Sequence[int], sampling: SamplingParams) -> Completion:
        choice, tokens = self._ask(self._body(prompt, sampling))
        if tokens is None:
            self.tells_tokens, tokenizer = False, self.target.tokenizer
            if tokenizer is None:
                raise ValueError(f"the server at {self._address} returns no token ids, and the target has no tokenizer")
            tokens = list(tokenizer(choice["text"], add_special_tokens=False)["input_ids"])
            if choice.get("finish_reason") == "stop" and not sampling.stop and not sampling.ignore_eos:
                tokens += sorted(self.target.eos_token_ids)[:1]  # it has stopped by itself
        return self.completion(prompt, sampling, tokens)

    def _ask(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[int] | None]:
        """Send a request; returns the first choice of its answer, and its tokens: None where they are not named.

        Raises:
            ValueError: There is no answer, it is an error, or it has another form.
        """
        own = self._owner == LLAMACPP  # its own endpoint names the parts of a character, too
        try:
            path = self._client.base_url.join("../completion" if own else "completions")
            answer = self._client.post(path, json=body)
            if not answer.is_error:
                choice = {"token_ids": answer.json()["tokens"]} if own else dict(answer.json()["choices"][0])
                named = choice.get("token_ids", choice.get("response_token_ids"))  # SGLang renames it (sglang#38459)
                return choice, None if named is None else [int(token) for token in named]
        except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
            cause = error or type(error).__name__
            raise ValueError(f"the server at {self._address} gave no answer: {cause}") from error
        raise ValueError(f"the server at {self._address} refused a request: {answer.text[:300]}")

    def _body(self, prompt: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
        """The body of a request. Fields beyond OpenAI's own are sent only where they change something."""
        if sampling.logits_processor is not None or sampling.grammar is not None:
            raise ValueError("a logits processor or a grammar is not sent to a server: leave this contender out")
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "seed": ((sampling.seed or 0) ^ (sampling.stream or 0)) & 0x7FFFFFFF,
        }
        usual = SamplingParams()
        asked = {name: value for name in BEYOND if (value := getattr(sampling, name)) != getattr(usual, name)}
        return body | PLAIN.get(self._owner, {}) | asked | self._extra
