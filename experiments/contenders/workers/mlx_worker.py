"""mlx-lm in its own environment, decoding token by token, so that the tokens of every round are known."""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def load(given: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Load the models as ``given`` says; return versions and threads, and what decodes a batch of one prompt."""
    import mlx.core as mx  # pyright: ignore[reportMissingImports]
    from mlx_lm.generate import (  # pyright: ignore[reportMissingImports]
        generate_step,
        generation_stream,
        speculative_generate_step,
    )
    from mlx_lm.sample_utils import make_repetition_penalty  # pyright: ignore[reportMissingImports]
    from mlx_lm.utils import load_model  # pyright: ignore[reportMissingImports]

    model, *draft = (
        load_model(Path(folder), model_config=rotary(Path(folder)))[0]
        for folder in (given["model"], *([given["draft"]] if "draft" in given else []))
    )

    def decode(asked: dict[str, Any]) -> dict[str, Any]:
        (ids,), (seed,), sampling = asked["prompts"], asked["seeds"], asked["sampling"]
        prompt, processors = mx.array(ids), []
        mx.random.seed(seed)
        if sampling["repetition_penalty"] != 1:
            penalize = make_repetition_penalty(sampling["repetition_penalty"], given["max_length"])
            before = prompt[:-1] if draft and given["patched"] else prompt[:0]
            processors = [lambda tokens, logits: penalize(mx.concatenate([before, tokens]), logits)]
        options = {"max_tokens": asked["max_new_tokens"], "sampler": sampler(sampling), "logits_processors": processors}
        if draft:
            made = speculative_generate_step(prompt, model, *draft, num_draft_tokens=given["num_tokens"], **options)
        else:
            made = ((token, None, False) for token, _ in generate_step(prompt, model, **options))
        tokens, rounds, begins, ended = [], [], True, False
        for token, _, drafted in made:
            if begins:
                rounds.append(1)  # the target's own token, which the last round may leave out
            rounds[-1] += drafted
            if not ended:
                tokens.append(token)
            ended, begins = ended or tokens[-1] in asked["ends"], not drafted
            if ended and begins:
                break
        mx.synchronize(generation_stream)  # plain decoding has begun a token too many
        return {"rows": [{"token_ids": tokens, "rounds": rounds}]}

    # Every stream has one thread, and the BLAS of its wheel for Linux has no more.
    return {"versions": {"mlx-lm": version("mlx-lm"), "mlx": version("mlx")}, "threads": 1}, decode


def sampler(sampling: dict[str, Any]) -> Callable[[Any], Any] | None:
    """mlx-lm's filters and draw behind the temperature, before which its own sampler filters; None if greedy."""
    from mlx_lm.sample_utils import apply_top_k, make_sampler  # pyright: ignore[reportMissingImports]

    temperature, top_k = sampling["temperature"], sampling.get("top_k", 0)
    if not temperature:
        return None
    filtered = make_sampler(1.0, top_p=sampling["top_p"], min_p=sampling["min_p"])

    def draw(logprobs: Any) -> Any:
        warm = logprobs * (1 / temperature)
        return filtered(apply_top_k(warm, top_k) if 0 < top_k < warm.shape[-1] else warm)

    return draw


def rotary(folder: Path) -> dict[str, Any]:
    """Where transformers 5 writes ``rope_parameters``, most models of mlx-lm read the names that it had before."""
    rope = json.loads((folder / "config.json").read_text()).get("rope_parameters") or {}
    if "rope_theta" not in rope:
        return {}
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
