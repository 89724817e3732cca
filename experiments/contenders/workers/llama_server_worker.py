"""llama.cpp's server in its own environment, through xllamacpp, with a small model that drafts."""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from llama_cpp_worker import converted


def load(given: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Load both models as ``given`` says; return versions and threads, and what decodes a batch of one prompt."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params = xllamacpp.CommonParams()
    params.port, params.warmup, params.n_parallel, params.n_ctx = 0, False, 1, given["max_length"]
    params.model.path = str(converted(Path(given["model"]), given["precision"], spelled=True))
    params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    draft = params.speculative.draft
    draft.mparams.path = str(converted(Path(given["draft"]), given["precision"], spelled=True))
    draft.n_max, draft.p_min, draft.probabilistic = given["num_tokens"], 0.0, given["probabilistic"]
    for part in (params, draft):
        part.cpuparams.n_threads = part.cpuparams_batch.n_threads = given["threads"]
        if given["precision"] == "F32":
            part.cache_type_k = part.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)

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
