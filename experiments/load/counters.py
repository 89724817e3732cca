"""A server's own counts, in Prometheus' text format under vLLM's names with any prefix."""

import re
from collections import Counter
from typing import Any

from experiments.load.run import Totals

_LINE = re.compile(r"^(?:\w+:)?(\w+?)(?:\{(.*)\})? (\S+)")
_NAMES = {
    "spec_decode_num_drafts_total": "rounds",
    "spec_decode_num_draft_tokens_total": "drafted",
    "spec_decode_num_accepted_tokens_total": "accepted",
    "spec_decode_num_accepted_tokens_per_pos_total": "at",
    "generation_tokens_total": "generated",
    "prefix_cache_queries_total": "queried",
    "prefix_cache_hits_total": "reused",
    "num_preemptions_total": "preempted",
    "request_queue_time_seconds_sum": "queue_seconds",
    "request_queue_time_seconds_count": "queued",
}
_ANSWER = {"num_spec_steps": "rounds", "num_draft_tokens": "drafted", "num_accepted_draft_tokens": "accepted"}


def counted(metrics: str, model: str) -> Counter[str]:
    """Return the counters of a model; those of several engines are added up, ``at i`` counts position i."""
    found: Counter[str] = Counter()
    for line in metrics.splitlines():
        match = _LINE.match(line)
        name = _NAMES.get(match[1]) if match else None
        if match is None or name is None:
            continue
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
        if labels.get("model_name", model) == model:
            found[f"at {labels.get('position')}" if name == "at" else name] += float(match[3])  # type: ignore[assignment]
    return found


def counted_by(answer: dict[str, Any]) -> Counter[str]:
    """Return what the end of one answer says of its speculation (``metrics.speculative_decoding``)."""
    told = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    return Counter({name: told[theirs] for theirs, name in _ANSWER.items() if told.get(theirs)})


def totals(run: Counter[str]) -> Totals:
    """Return what a run did in all; a server counts the rounds that had a draft."""
    return Totals(**{name: int(run[name]) for name in vars(Totals()) if name in run})


def facts(run: Counter[str]) -> dict[str, Any]:
    """Return figures that only the server's counters have.

    ``acceptance_at``: the accepted tokens at each position over the rounds with a draft. ``tokens_per_round`` is over
    all rounds, also those without a draft; drafts that were cut at the end of an output make it a little too large.
    """
    places = sorted(int(name[3:]) for name in run if name.startswith("at "))
    rounds, single = run["rounds"], run["generated"] - run["accepted"]
    return {
        "acceptance_at": [run[f"at {place}"] / rounds for place in places] if rounds else [],
        "tokens_per_round": run["generated"] / single if rounds and single > 0 else None,
        "queue_seconds": run["queue_seconds"] / run["queued"] if run["queued"] else None,
    }
