"""Records that nobody measured: what a test does not care about is filled in."""

from typing import Any

from experiments.results.records import Record


def output(prompt: str = "a", method: str = "fast", *, tokens: int = 3, **fields: Any) -> Record:
    """One output of an exact rule, or of none (``plain``); its rounds are those of ``accepted``, no more is drafted."""
    accepted = fields.get("accepted", (0,))
    depth = fields.get("proposed_depth", accepted)
    filled: dict[str, Any] = {
        "prompt": prompt, "method": method, "exactness": None if method == "plain" else "exact", "temperature": 0.0,
        "batch": 0, "prompt_tokens": 5, "token_ids": tuple(range(tokens)), "finish_reason": "length", "seconds": 1.0,
        "accepted": accepted, "expected_accepted": tuple(map(float, accepted)),
        "proposed_depth": depth, "proposed_nodes": depth,
    }  # fmt: skip
    return Record(**filled | fields)


def moments(*emissions: tuple[float, int], arrived: float = 0.0, admitted: float = 0.0, prefilled: float = 0.0) -> Any:
    """Fields of a request whose host saw so many tokens at these moments."""
    moments, counts = zip(*emissions, strict=True)
    told = {"arrived": arrived, "admitted": admitted, "prefilled": prefilled, "finished": moments[-1]}
    return told | {"token_ids": tuple(range(sum(counts))), "emitted_at": moments, "emitted": counts}
