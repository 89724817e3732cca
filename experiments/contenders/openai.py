"""A server with an OpenAI-compatible completions endpoint: vLLM, SGLang, llama.cpp and others."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from experiments.contenders.base import OtherEngine
from specdec.requests import SamplingParams
from specdec.types import Completion

KEY = "OPENAI_API_KEY"
"""The environment variable that has the server's key, if it wants one."""
ID = "token_id:"
"""The beginning of a token's name where vLLM was asked not to tell its text; its number follows."""
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
BEYOND = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "priority": 0,
    "deadline": None,
}
"""Fields, and parameters of ``SamplingParams``, that are sent only where they differ from this."""


class ServerError(RuntimeError):
    """The server does not answer, or with an error; says so in one sentence."""


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
        patience: Seconds that one request may wait in all where the server limits rates (status 429).
        extra: More fields of every request, over those of ``PLAIN``.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str | None = None,
        timeout: float = 300.0,
        patience: float = 300.0,
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
        self._address, self._patience, self._owner = base_url, patience, ""
        self._model, self._extra = model, dict(extra or {})

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
        """Send a request; returns the first choice of its answer, and its tokens: None where not all are named.

        Raises:
            ServerError: There is no answer, it is an error, or it has another form.
        """
        own = self._owner == LLAMACPP  # its own endpoint names the parts of a character, too
        try:
            answer = self._posted("../completion" if own else "completions", body)
            if answer.is_error:
                raise ServerError(f"the server at {self._address} refused a request: {answer.text[:300]}")
            whole = answer.json()
            choice = {"token_ids": whole["tokens"]} if own else dict(whole["choices"][0])
            return choice, _named(choice, (whole.get("usage") or {}).get("completion_tokens"))
        except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
            cause = error or type(error).__name__
            raise ServerError(f"the server at {self._address} gave no answer: {cause}") from error

    def _posted(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """The answer to a request, which is sent again where the server limits rates: as late as it says."""
        end, pause = time.monotonic() + self._patience, 1.0
        while True:
            answer = self._client.post(self._client.base_url.join(path), json=body)
            if answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
                return answer
            after = answer.headers.get("Retry-After", "")
            pause = float(after) if after.isdecimal() else pause
            if time.monotonic() + pause > end:
                raise ServerError(
                    f"the server at {self._address} limits rates, and wants {pause:g} more seconds where patience="
                    f"{self._patience:g} is nearly over: ask less at once (engine.max_batch_size), or give more"
                )
            time.sleep(pause)
            pause *= 1 if after else 2

    def _body(self, prompt: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
        """The body of a request. Fields beyond OpenAI's own are sent only where they change something."""
        if sampling.logits_processor is not None or sampling.grammar is not None:
            raise ValueError("a logits processor or a grammar is not sent to a server: leave this contender out")
        params = {name: getattr(sampling, name) for name in BEYOND}
        params |= {name: list(params[name]) for name in ("stop", "stop_token_ids")}
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "seed": ((sampling.seed or 0) ^ (sampling.stream or 0)) & 0x7FFFFFFF,
        }
        asked = {name: value for name, value in params.items() if value != BEYOND[name]}
        return body | PLAIN.get(self._owner, {}) | asked | self._extra


def _named(choice: Mapping[str, Any], count: int | None) -> list[int] | None:
    """The generated tokens, as themselves or beside their log-probabilities; None if these are not ``count``.

    There they are vLLM's ``token_id:5``, or llama.cpp's ids, which leave out the parts of characters.
    """
    for field in ("token_ids", "response_token_ids"):  # SGLang renames it (sglang#38459)
        if choice.get(field) is not None:
            return [int(token) for token in choice[field]]
    beside = choice.get("logprobs") or {}
    if "content" in beside:
        named = [at["id"] for at in beside["content"]]
    else:
        named = [name[len(ID) :] for name in map(str, beside.get("tokens") or ()) if name.startswith(ID)]
    return [int(token) for token in named] if named and count in (None, len(named)) else None
