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


class ServerError(RuntimeError):
    """The server does not answer; says so in one sentence."""


class RefusedError(ServerError):
    """The server answers a request with an error."""


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

    needs_weights = False

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
        key = os.environ.get(KEY)
        self.address, self.timeout, self.patience = base_url, timeout, patience
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=base_url.rstrip("/") + "/", timeout=timeout, headers=self.headers)
        self._model, self._extra, self._owner = model, dict(extra or {}), ""

    @property
    def model(self) -> str:
        """The model's name at the server, known after ``check``."""
        return self._model or ""

    def url(self, path: str) -> httpx.URL:
        """The address of an endpoint."""
        return self._client.base_url.join(path)

    def metrics(self) -> str:
        """The server's counters in Prometheus' format; empty where it has none."""
        try:
            answer = self._client.get(self._client.base_url.join("../metrics"))
        except httpx.HTTPError:
            return ""
        return "" if answer.is_error else answer.text

    def check(self) -> None:
        """Ask the server for its models; it has to be there and to know ours."""
        try:
            answer = self._client.get("models")
            answer.raise_for_status()
            models = {str(each["id"]): each for each in answer.json()["data"]}
        except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"no OpenAI-compatible server answers at {self.address}: start one, or give another base_url ({error})"
            ) from error
        served = list(models)
        if self._model is None and len(served) != 1:
            raise ValueError(f"the server at {self.address} has {len(served)} models: give model=…, of {served}")
        if self._model is not None and self._model not in served:
            raise ValueError(f"the server at {self.address} has no model {self._model!r}: choose among {served}")
        self._model = self._model or served[0]
        said = models[self._model]
        self._owner = str(said.get("owned_by"))
        longest = said.get("max_model_len") or (said.get("meta") or {}).get("n_ctx")  # llama.cpp: of one sequence
        self.max_length = min(self.max_length, int(longest or self.max_length))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], *, speculate: bool = True
    ) -> list[Completion]:
        """Send all prompts at once, and wait for all answers."""
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            return list(pool.map(self._one, prompts, sampling))

    def _one(self, prompt: Sequence[int], sampling: SamplingParams) -> Completion:
        choice = self.ask(self.body(prompt, sampling), own=self._owner == LLAMACPP)
        tokens = choice["token_ids"]
        if tokens is None:
            tokens, self.tells_tokens = self._tokens(choice, sampling), False
        return self.completion(prompt, sampling, tokens)

    def ask(self, body: Mapping[str, Any], *, own: bool = False) -> dict[str, Any]:
        """Send a request and return the first choice of its answer, with ``token_ids``: None where not all are named.

        Args:
            own: Ask llama.cpp's own endpoint, which names the parts of a character, too.

        Raises:
            RefusedError: The answer is an error.
            ServerError: There is none, or one of another form.
        """
        try:
            answer = self._posted("../completion" if own else "completions", body)
            if answer.is_error:
                raise RefusedError(f"the server at {self.address} refused a request: {answer.text[:300]}")
            told = answer.json()
            choice = {"token_ids": told["tokens"]} if own else dict(told["choices"][0])
            return choice | {"token_ids": _named(choice, (told.get("usage") or {}).get("completion_tokens"))}
        except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(
                f"the server at {self.address} gave no answer: {error or type(error).__name__}"
            ) from error

    def _posted(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """The answer to a request, which is sent again where the server limits rates: as late as it says."""
        end, pause = time.monotonic() + self.patience, 1.0
        while True:
            answer = self._client.post(self.url(path), json=body)
            if answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
                return answer
            after = answer.headers.get("Retry-After", "")
            pause = float(after) if after.isdecimal() else pause
            if time.monotonic() + pause > end:
                raise RefusedError(
                    f"the server at {self.address} limits rates, and wants {pause:g} more seconds where patience="
                    f"{self.patience:g} is nearly over: ask less at once (engine.max_batch_size), or give more patience"
                )
            time.sleep(pause)
            pause *= 1 if after else 2

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def body(self, prompt: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
        """The body of a request. Fields beyond OpenAI's own are sent only where they change something."""
        if sampling.logits_processor is not None or sampling.grammar is not None:
            raise ValueError("a logits processor or a grammar is not sent to a server: leave this contender out")
        stop_token_ids = list(sampling.stop_token_ids)
        beyond = {
            "top_k": (sampling.top_k, 0),
            "min_p": (sampling.min_p, 0.0),
            "repetition_penalty": (sampling.repetition_penalty, 1.0),
            "stop_token_ids": (stop_token_ids, []),
            "ignore_eos": (sampling.ignore_eos, False),
            "priority": (sampling.priority, 0),
            "deadline": (sampling.deadline, None),
            "user": (sampling.user, ""),
        }
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "seed": ((sampling.seed or 0) ^ (sampling.stream or 0)) & 0x7FFFFFFF,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        asked = {name: value for name, (value, default) in beyond.items() if value != default}
        return body | PLAIN.get(self._owner, {}) | asked | self._extra

    def _tokens(self, choice: Mapping[str, Any], sampling: SamplingParams) -> list[int]:
        """The tokens of a text, with an EOS behind it where the server stopped by itself."""
        tokens = self.tokenize(choice["text"])
        own_end = choice.get("finish_reason") == "stop" and not sampling.stop and not sampling.ignore_eos
        return [*tokens, *sorted(self.target.eos_token_ids)[:1]] if own_end else tokens

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text by the target's tokenizer."""
        if self.target.tokenizer is None:
            raise ValueError(f"the server at {self.address} returns no token ids, and the target has no tokenizer")
        return list(self.target.tokenizer(text, add_special_tokens=False)["input_ids"])


def _named(choice: Mapping[str, Any], count: int | None) -> list[int] | None:
    """The generated tokens, as themselves or beside their log-probabilities; None if these are not ``count``.

    There they are vLLM's ``token_id:5``, or llama.cpp's ids, which leave out the parts of characters.
    """
    for field in ("token_ids", "response_token_ids"):  # SGLang renames it (sglang#38459)
        if choice.get(field) is not None:
            return [int(token) for token in choice[field]]
    told = choice.get("logprobs") or {}
    if "content" in told:
        named = [at["id"] for at in told["content"]]
    else:
        named = [name[len(ID) :] for name in map(str, told.get("tokens") or ()) if name.startswith(ID)]
    return [int(token) for token in named] if named and count in (None, len(named)) else None
