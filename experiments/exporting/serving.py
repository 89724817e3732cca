"""The commands that serve an exported drafter."""

import json
import shlex
from pathlib import Path
from typing import Any

from drafters.heads.eagle_export import TOKENS as EAGLE_TOKENS
from drafters.heads.mtp_export import TOKENS as MTP_TOKENS
from experiments.exporting.kinds import DFLASH, DSPARK, EAGLE, EAGLE3, LM, MEDUSA, MTP
from experiments.exporting.reading import Found

_LM_TOKENS = 4
_VLLM = {EAGLE: "eagle", EAGLE3: "eagle3", DFLASH: "dflash", DSPARK: "dspark", LM: "draft_model"}
_SGLANG = {EAGLE: "EAGLE", EAGLE3: "EAGLE3", DFLASH: "DFLASH", DSPARK: "DSPARK", LM: "STANDALONE"}


def tokens_of(found: Found) -> int:
    """Returns how many tokens a server drafts per round if nothing else is said."""
    module: Any = found.module
    if found.kind in (DFLASH, DSPARK):
        return module.config.tokens
    if found.kind == MEDUSA:
        return module.num_heads
    return {MTP: MTP_TOKENS, LM: _LM_TOKENS}.get(found.kind, EAGLE_TOKENS)


def most_tokens(found: Found) -> int | None:
    """Returns how many tokens a drafter can draft per round; None if it goes on by reading its own output."""
    return tokens_of(found) if found.kind in (DFLASH, DSPARK, MEDUSA) else None


def commands(found: Found, *, layout: str, folder: Path, target: str, tokens: int) -> list[tuple[str, str]]:
    """Returns engines, and the command with which each serves what was written.

    Args:
        found: The drafter.
        layout: The format that it was written in.
        folder: Where it is.
        target: The target's name; empty if it is not known.
        tokens: Drafted tokens per round.
    """
    model, kind = shlex.quote(target) if target else "TARGET", found.kind
    given: list[tuple[str, str]] = []
    if layout == "speculators" and kind != MTP:
        given.append(("vLLM", f"vllm serve {shlex.quote(str(folder))}"))
    if kind in _VLLM and layout != "sglang":
        setting = {"method": _VLLM[kind], "model": str(folder), "num_speculative_tokens": tokens}
        if kind == DSPARK:
            setting["draft_sample_method"] = "probabilistic"
        given.append(("vLLM", f"vllm serve {model} --speculative-config {shlex.quote(json.dumps(setting))}"))
    if kind in _SGLANG and layout == "sglang":
        words = [
            f"python -m sglang.launch_server --model-path {model} --speculative-algorithm {_SGLANG[kind]}",
            f"--speculative-draft-model-path {shlex.quote(str(folder))}",
        ]
        if kind not in (DFLASH, DSPARK):  # the configuration says how long a block is
            words.append(f"--speculative-num-steps {tokens} --speculative-eagle-topk 1")
            words.append(f"--speculative-num-draft-tokens {tokens + 1}")
        given.append(("SGLang", " ".join(words)))
    return given
