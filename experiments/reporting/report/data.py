"""The outputs of runs as compact data, from which the page draws its token view when a reader asks for it.

The form, which ``tokens.js`` reads:

- ``runs``: for each run its ``name``, its ``texts`` (token id → text), its ``prompts``, and its ``outputs``.
- A prompt is ``{id, category, turns}``.
- An output names its prompt by number (``p``), and has ``method``, ``T`` (temperature), ``turn`` and ``sample``; the
  ids of its tokens (``k``), and for each of them its round (``r``) and its source (``s``, a number: see ``SOURCES``);
  the texts (``x``) of tokens that read differently in their context; ``rounds``; and what its record says.
- A round is ``{a, d, n}`` (accepted, proposed depth, proposed nodes). With a trace it also has ``e``, the expected
  number of accepted tokens, and the tree: for every node its token (``k``), parent (``up``), and p and q after its
  parent (``p``, ``q``; null where unknown); the numbers of the accepted nodes (``path``); the token that followed
  (``next``: id, p, q); and the likely tokens at the root and along the path (``likely``: lists of id, p, q).
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.results.lossless import explained
from experiments.results.records import Record, Source
from experiments.results.runs import Run
from experiments.results.texts import in_context, read_prompts, text_of
from experiments.tracing.rounds import DraftedRound, Odds, Output

SOURCES = tuple(Source)
"""Sources by their numbers in the data."""
LONGEST_PROMPT = 4000
"""Characters of a prompt's turn that are shown; of a longer one, its end."""


def choose_prompts(records: Sequence[Record], limit: int) -> list[str]:
    """Ids of the prompts to show: those where an output differs from plain decoding's first, then from the start.

    Returns:
        At most ``limit`` of them, in the run's order.
    """
    differs = {record.prompt for record in records if record.equals_plain is False and not explained(record)}
    ties = {record.prompt for record in records if record.equals_plain is False}
    order = list(dict.fromkeys(record.prompt for record in records))
    ranked = sorted(order, key=lambda prompt: (prompt not in differs, prompt not in ties))
    chosen = set(ranked[:limit])
    return [prompt for prompt in order if prompt in chosen]


def tokens_of(outputs: Sequence[Output]) -> set[int]:
    """Ids of all tokens that the token view of some outputs names."""
    tokens = {token for output in outputs for token in output.record.token_ids}
    return tokens | {odds.token for output in outputs for each in output.rounds for odds in each.tokens()}


def as_script(runs: Sequence[Mapping[str, Any]]) -> str:
    """The data of all runs as the text of a script element: no character of it can end it or begin another."""
    data = {"version": 1, "sources": [str(source) for source in SOURCES], "runs": runs}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text.encode("utf-8", errors="replace").decode()  # lone surrogates would make the file unreadable


def run_data(name: str, run: Run, outputs: Sequence[Output], texts: Mapping[int, bytes]) -> dict[str, Any]:
    """The data of a run for the token view, as the module's text describes; ``name`` is empty for the only run."""
    prompts = list(dict.fromkeys(output.record.prompt for output in outputs))
    categories = {output.record.prompt: output.record.category for output in outputs}
    turns, place = read_prompts(run.folder), {prompt: number for number, prompt in enumerate(prompts)}
    return {
        "name": name,
        "texts": {str(token): text_of(token, texts) for token in sorted(tokens_of(outputs))},
        "prompts": [
            {"id": prompt, "category": categories[prompt], "turns": [_cut(turn) for turn in turns.get(prompt, ())]}
            for prompt in prompts
        ],
        "outputs": [_output(output, place[output.record.prompt], texts) for output in outputs],
    }


def _cut(turn: str) -> str:
    return turn if len(turn) <= LONGEST_PROMPT else "… " + turn[-LONGEST_PROMPT:]


def _output(output: Output, prompt: int, texts: Mapping[int, bytes]) -> dict[str, Any]:
    record = output.record
    ids = [token.token for token in output.tokens]
    words = in_context(ids, texts)
    return {
        "p": prompt,
        "method": record.method,
        "T": record.temperature,
        "turn": record.turn,
        "sample": record.sample,
        "k": ids,
        "r": [token.round for token in output.tokens],
        "s": [SOURCES.index(token.source) for token in output.tokens],
        "x": {str(i): word for i, (k, word) in enumerate(zip(ids, words, strict=True)) if word != text_of(k, texts)},
        "rounds": [
            {"a": a, "d": d, "n": n, **(_tree(output.rounds[number]) if output.rounds else {})}
            for number, (a, d, n) in enumerate(
                zip(record.accepted, record.proposed_depth, record.proposed_nodes, strict=True)
            )
        ],
        "finish": record.finish_reason,
        "error": record.error,
        "promptTokens": record.prompt_tokens,
        "equal": record.equals_plain,
        "differs": record.divergence,
        "margin": _short(record.margin),
        "tie": explained(record) if record.equals_plain is False else None,
    }


def _tree(drafted: DraftedRound) -> dict[str, Any]:
    return {
        "e": _short(drafted.expected_accepted),
        "k": [node.token for node in drafted.nodes],
        "up": list(drafted.parents),
        "p": [_short(node.p) for node in drafted.nodes],
        "q": [_short(node.q) for node in drafted.nodes],
        "path": list(drafted.path),
        "next": _odds(drafted.next),
        "likely": [[_odds(odds) for odds in likely] for likely in drafted.likely],
    }


def _odds(odds: Odds) -> list[Any]:
    return [odds.token, _short(odds.p), _short(odds.q)]


def _short(value: float | None) -> float | None:
    """Three digits, which is what a reader takes in; None for what JSON cannot say."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.3g}")
