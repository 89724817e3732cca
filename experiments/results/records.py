"""Records: one JSON line per prompt, turn, sample and method, the rows of the frame; and the source of each token."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from experiments.results.origin import replace_text

RECORDS = "records.jsonl"

PLAIN = "plain"
"""The name of plain decoding, the baseline, in all results."""
EXACT = "exact"
"""The promise of a rule whose output follows the target, where the package's own tests have confirmed it."""
DECLARED = "exact (declared)"
"""The same promise of any other rule or engine."""
OTHERWISE = "exact (declared), rounds otherwise"
"""Likewise of an engine with other kernels or weights of its own: greedy outputs need not equal plain decoding's."""

MEMORY = ("reused", "preemptions", "recomputed", "swapped", "swap_seconds", "preempted")
"""What caches and preemption did for a request (``specdec.types.Timestamps``): tokens found in a cache, slots lost,
tokens prefilled again, tokens that came back from the host's memory, its seconds, and seconds without a slot."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One method's output for one prompt, and how it came about. docs/measurements.md has the columns of its frame.

    Records that share a batch carry the same figures of the batch as a whole (``seconds``, ``stage_seconds``, ``load``,
    ``joules``, ``work``): do not add them up over records. Moments are seconds since the batch's call began, on one
    monotonic clock; None for an engine that does not tell.

    Attributes:
        exactness: What its verifier promises (``Exactness``), or "exact (declared)"; None for plain decoding.
        batch: Number of the batch that it ran in, equal for all methods; one turn of it is the unit that was timed.
            -1 for a prompt that did not run.
        finish_reason: ``"stop"``, ``"length"`` or ``"error"``: a failure, whose figures do not count.
        load: Cores that were busy meanwhile: ``own`` (this process), ``others``, and how many ``cores`` there are.
        emitted_at: When the host saw tokens, round by round; ``emitted``: how many these were, after cuts.
        ingestion: Seconds of template and tokenizer for this request, which ran before the call.
        memory: What caches and preemption did (``MEMORY``); what is 0 is left out.
        accepted: Accepted tokens of every round, before any cut; ``expected_accepted``: their expectations.
        distance_tv: For a lossy rule, how far the distribution of every round's first token is from p.
        equals_plain: The output is the one of plain decoding; None where that is not to be expected (sampled, or a
            later turn after answers that differed) or cannot be known.
        divergence: Index of the first output token that differs, with the method's and plain decoding's there.
        margin: How far the lower of the two is below the largest logit there, in nats: near 0, a tie of this dtype.
            None if one output ends where the other goes on, or if a token is impossible there.
        tie_bound: The largest margin that this dtype explains at that place (``specdec.checks.ties``).
        work: What the batch had to do, by stage (``experiments.measuring.accounting``).
    """

    prompt: str
    turn: int = 0
    category: str = ""
    sample: int = 0
    method: str
    exactness: str | None = None
    temperature: float
    batch: int
    prompt_tokens: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str
    error: str | None = None
    traceback: str | None = None
    seconds: float | None = None
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    load: Mapping[str, float] = field(default_factory=dict)
    joules: float | None = None
    arrived: float | None = None
    admitted: float | None = None
    prefilled: float | None = None
    finished: float | None = None
    emitted_at: tuple[float, ...] = ()
    emitted: tuple[int, ...] = ()
    ingestion: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    accepted: tuple[int, ...] = ()
    expected_accepted: tuple[float, ...] = ()
    proposed_depth: tuple[int, ...] = ()
    proposed_nodes: tuple[int, ...] = ()
    distance_tv: tuple[float | None, ...] = ()
    distance_kl: tuple[float | None, ...] = ()
    equals_plain: bool | None = None
    divergence: int | None = None
    tokens_at_divergence: tuple[int | None, ...] = ()
    texts_at_divergence: tuple[str | None, ...] = ()
    margin: float | None = None
    tie_bound: float | None = None
    work: Mapping[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.finish_reason == "error"


def begin_records(path: Path, kept: Sequence[Record] | None = None) -> None:
    """Begin a file with the records that an interrupted attempt has left; without such an attempt it must be new."""
    if kept is None and path.exists():
        raise ValueError(f"{path} exists, from another run: write to another folder, or remove it")
    replace_text(path, "".join(map(_line, kept or ())))


def keep_record(path: Path, record: Record) -> None:
    """Append a record, which is on the disk before the next one begins."""
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(_line(record))


def _line(record: Record) -> str:
    return json.dumps(asdict(record), ensure_ascii=False) + "\n"


def read_records(path: str | Path) -> list[Record]:
    """Read a run's records again; a last line that a crash left unfinished is left out.

    Raises:
        ValueError: A line is not a record, or one of another version (with its number).
    """
    records = []
    # Every record ends with a line break: what stands behind the last one is empty, or not finished.
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            row: dict[str, Any] = json.loads(line)
            row = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
            records.append(Record(**row))
        except (TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path}, line {number} is not a record, or one of another version of this program: {error}"
            ) from error
    return records


def finished_batches(
    folder: Path, turns: Mapping[float, Sequence[int]], *, methods: Sequence[int], size: int
) -> tuple[list[Record], dict[float, set[int]]]:
    """Return the records of all batches that every method has finished, and the batches' numbers, by temperature.

    A batch of which a record is missing is run again as a whole, because what was timed together has one time.
    ``turns`` has the number of turns of each job, by temperature; ``methods`` how many run together, by block.
    """
    records = read_records(folder / RECORDS) if (folder / RECORDS).exists() else []
    counts = Counter((record.temperature, record.batch) for record in records)
    done: dict[float, set[int]] = {}
    for temperature, listed in turns.items():
        sizes = [count * sum(listed[at : at + size]) for count in methods for at in range(0, len(listed), size)]
        done[temperature] = {number for number, wanted in enumerate(sizes) if counts[temperature, number] == wanted}
    kept = [record for record in records if record.batch in done.get(record.temperature, ())]
    return kept, done


# ---------------------------------------------------------------- where each token came from


class Source(StrEnum):
    """The origin of a token of the output: accepted from the draft, or drawn by the rule."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"  # drawn after a rejection
    BONUS = "bonus"  # drawn from p after everything on its branch was accepted
    EITHER = "recovered or bonus"  # a record of a tree does not tell whether the accepted branch went on; a trace does
    TARGET = "target"  # nothing was drafted in its round: drawn from p, as in plain decoding


class SourcedToken(NamedTuple):
    """A token of an output, and the number of the round that emitted it, from 0.

    Its depth is its place in the round, from 1: an accepted token's depth in the draft tree.
    """

    token: int
    round: int
    depth: int
    source: Source


def sourced(record: Record, at_leaf: Sequence[bool] = ()) -> list[SourcedToken]:
    """The tokens of an output, each with its source.

    A round emits its accepted tokens and one more; the last round's may be cut. ``at_leaf`` says whether each round's
    accepted path ended at a leaf of its tree, where a trace tells.
    """
    sources: list[tuple[int, int, Source]] = []
    columns = zip(record.accepted, record.proposed_depth, record.proposed_nodes, strict=True)
    for number, (accepted, depth, nodes) in enumerate(columns):
        sources += [(number, place, Source.ACCEPTED) for place in range(1, accepted + 1)]
        sources.append((number, accepted + 1, _after(accepted, depth, nodes, at_leaf[number] if at_leaf else None)))
    return [SourcedToken(token, *source) for token, source in zip(record.token_ids, sources, strict=False)]


def _after(accepted: int, depth: int, nodes: int, leaf: bool | None) -> Source:
    """The source of the token that ends a round."""
    if nodes == 0:
        return Source.TARGET
    if leaf is not None:
        return Source.BONUS if leaf else Source.RECOVERED
    if accepted == depth:  # the longest branch: it cannot go on
        return Source.BONUS
    return Source.RECOVERED if nodes == depth else Source.EITHER  # a chain has as many nodes as its depth
