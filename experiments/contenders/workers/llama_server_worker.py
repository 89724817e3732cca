"""llama.cpp's server in its own environment, through xllamacpp, with a small model that drafts.

``VENV/bin/python llama_server_worker.py '{"model": "FOLDER", "draft": "FOLDER"}'`` starts it for others, at port 8080,
with models in float32 in transformers' layout; without ``draft`` it decodes plainly.
"""

import json
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from llama_cpp_worker import converted

ALONE = {
    "port": 8080, "precision": "F32", "max_length": 512, "max_batch_size": 4, "threads": 1, "num_tokens": 1,
    "probabilistic": False,
}  # fmt: skip
"""How it is started for others, unless they say so."""


def load(given: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Load both models as ``given`` says; return versions and threads, and what decodes a batch of one prompt."""
    server = serving(given)

    def decode(asked: dict[str, Any]) -> dict[str, Any]:
        (prompt,), (seed,) = asked["prompts"], asked["seeds"]
        body = {
            "top_k": 0, "top_p": 1.0, "min_p": 0.0, **asked["sampling"], "prompt": prompt, "seed": seed,
            "n_predict": asked["max_new_tokens"], "return_tokens": True, "cache_prompt": False,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],  # filters behind the temperature, as elsewhere
        }  # fmt: skip
        request = Request(f"{server.listening_address}/completion", json.dumps(body).encode())
        with urlopen(request) as answer:
            tokens = json.load(answer)["tokens"]
        end = next((index + 1 for index, token in enumerate(tokens) if token in asked["ends"]), None)
        return {"rows": [{"token_ids": tokens[:end], "rounds": []}]}

    return {"versions": {"xllamacpp": version("xllamacpp")}, "threads": given["threads"]}, decode


def serving(given: dict[str, Any]) -> Any:
    """Start the server, and return it."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params = xllamacpp.CommonParams()
    params.port, params.warmup, params.n_parallel = given.get("port", 0), False, given["max_batch_size"]
    params.n_ctx = given["max_length"] * given["max_batch_size"]
    params.model.path = str(converted(Path(given["model"]), given["precision"], spelled=True))
    parts = [params]
    if "draft" in given:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft = params.speculative.draft
        draft.mparams.path = str(converted(Path(given["draft"]), given["precision"], spelled=True))
        draft.n_max, draft.p_min, draft.probabilistic = given["num_tokens"], 0.0, given["probabilistic"]
        parts.append(draft)
    for part in parts:
        part.cpuparams.n_threads = part.cpuparams_batch.n_threads = given["threads"]
        if given["precision"] == "F32":
            part.cache_type_k = part.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if given["precision"] == "F32":  # flash attention casts keys and values to half precision
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


if __name__ == "__main__":
    running = serving(ALONE | json.loads(sys.argv[1]))  # it ends with its object
    print(running.listening_address, flush=True)
    signal.pause()
