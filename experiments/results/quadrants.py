"""Four kinds of requests, by the length of their input and output: what each is about, and what drafters do there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.results.records import PLAIN, Record
from experiments.results.requests.timeline import Timeline, timeline_of
from experiments.results.runs import Run, records_of
from experiments.results.statistics import Bootstrap, Interval, ratio_of_sums
from experiments.results.summary import MethodSummary

INPUT, OUTPUT = "dataset.tokens", "sampling.max_new_tokens"
"""The settings in which the four runs differ."""


@dataclass(frozen=True)
class Metric:
    """What a quadrant is about.

    Attributes:
        name: In a table.
        meaning: In a sentence.
        unit: Its unit.
    """

    name: str
    meaning: str
    unit: str


METRICS = {
    "SS": Metric("requests/min", "requests per minute", "per minute"),
    "SL": Metric("TPOT", "time per output token after the first", "ms"),
    "LS": Metric("TTFT", "time to first token", "ms"),
    "LL": Metric("slot time", "time that a request holds its slot", "s"),
}
"""By quadrant: the first letter is the input's length (short, long), the second the output's."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A method in a quadrant: means over requests, in seconds where nothing else is said.

    Attributes:
        method: Its name.
        summary: All of its figures.
        requests_per_minute: Requests over the time of the calls.
        ttft: Arrival to first token.
        tpot: Time per output token after the first; None where all outputs have one token.
        slot_time: Admission to end: how long a request holds its slot.
        own: The quadrant's metric, in its unit.
        gain: How many times better than plain decoding's that is; above 1 is better in every quadrant. None for plain
            decoding.
        gain_interval: Over prompts; what was timed together is drawn together.
    """

    method: str
    summary: MethodSummary
    requests_per_minute: float | None
    ttft: float | None
    tpot: float | None
    slot_time: float | None
    own: float | None = None
    gain: float | None = None
    gain_interval: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class Quadrant:
    """One kind of requests.

    Attributes:
        name: ``"SS"``, ``"SL"``, ``"LS"`` or ``"LL"``.
        run: Where it was measured.
        temperature: The requests'.
        input_tokens, output_tokens: The mean lengths that were measured; outputs are plain decoding's.
        asked: The most output tokens that a request could have.
        kv_begin, kv_end: Bytes of keys and values of one request before its first token and behind its last; None
            where the run does not say what a position takes.
        methods: Plain decoding first.
    """

    name: str
    run: Run
    temperature: float
    input_tokens: float
    output_tokens: float
    asked: int
    kv_begin: float | None
    kv_end: float | None
    methods: tuple[Figures, ...]

    @property
    def metric(self) -> Metric:
        """What it is about."""
        return METRICS[self.name]

    @property
    def rows_per_gigabyte(self) -> float | None:
        """How many requests of this kind a gigabyte (1e9 bytes) of cache holds at their full length."""
        return None if not self.kv_end else 1e9 / self.kv_end

    @property
    def plain(self) -> Figures | None:
        """Plain decoding's figures."""
        return next((each for each in self.methods if each.method == PLAIN), None)

    @property
    def ended_early(self) -> bool:
        """Whether outputs were less than half as long as asked for: then it is not the kind that it is called."""
        return self.output_tokens < self.asked / 2


def quadrants(runs: Sequence[Run], bootstrap: Bootstrap) -> list[Quadrant]:
    """Returns the quadrants of four runs, at every temperature, in the order SS, SL, LS, LL.

    Args:
        runs: One for each pair of two input lengths and two output lengths; fewer, if some have failed.
        bootstrap: Settings of the intervals.

    Raises:
        ValueError: The runs do not have two lengths of each, or two runs have the same.
    """
    lengths = [(_input(run), _output(run)) for run in runs]
    inputs, outputs = (sorted({pair[side] for pair in lengths}) for side in (0, 1))
    if len(inputs) != 2 or len(outputs) != 2 or len(set(lengths)) < len(lengths):
        raise ValueError(
            f"quadrants need runs at two input lengths and two output lengths, each pair once, and these have "
            f"{INPUT}={_listed(inputs)} and {OUTPUT}={_listed(outputs)} in {len(runs)} runs: give "
            f"{INPUT}=64,640 {OUTPUT}=16,160"
        )
    found = []
    for run, (length, most) in zip(runs, lengths, strict=True):
        name = ("L" if length == inputs[1] else "S") + ("L" if most == outputs[1] else "S")
        records = records_of(run.folder)
        for temperature in sorted({method.temperature for method in run.summary.methods}):
            found.append(_quadrant(name, run, temperature, records, bootstrap))
    order = list(METRICS)
    return sorted(found, key=lambda each: (each.temperature, order.index(each.name)))


def _quadrant(name: str, run: Run, temperature: float, records: Sequence[Record], bootstrap: Bootstrap) -> Quadrant:
    summaries = [method for method in run.summary.methods if method.temperature == temperature]
    good = [record for record in records if record.temperature == temperature and not record.failed]
    own = {method.method: [record for record in good if record.method == method.method] for method in summaries}
    shown = own.get(PLAIN) or good
    inputs = _mean([record.prompt_tokens for record in shown]) or 0.0
    outputs = _mean([len(record.token_ids) for record in shown]) or 0.0
    per_position = run.manifest["target"].get("kv_bytes_per_position")
    figures = [_figures(method, own[method.method]) for method in summaries]
    measure = _MEASURES[name]
    compared = []
    for each in figures:
        gain, interval = (None, None)
        if each.method != PLAIN:
            gain, interval = _gain(measure, own[each.method], own.get(PLAIN, []), bootstrap)
        compared.append(replace(each, own=_own(name, each), gain=gain, gain_interval=interval))
    return Quadrant(
        name=name,
        run=run,
        temperature=temperature,
        input_tokens=inputs,
        output_tokens=outputs,
        asked=_output(run),
        kv_begin=None if per_position is None else per_position * inputs,
        kv_end=None if per_position is None else per_position * (inputs + outputs),
        methods=tuple(sorted(compared, key=lambda each: each.method != PLAIN)),
    )


def _figures(method: MethodSummary, records: Sequence[Record]) -> Figures:
    lines = [line for line in map(timeline_of, records) if line is not None]
    rate = None if method.requests is None else method.requests.requests_per_second
    return Figures(
        method=method.method,
        summary=method,
        requests_per_minute=None if rate is None else 60 * rate,
        ttft=_mean([line.ttft for line in lines]),
        tpot=_mean([line.tpot for line in lines]),
        slot_time=_mean([_slot_time(line) for line in lines]),
    )


def _own(name: str, figures: Figures) -> float | None:
    """The quadrant's own metric, in its unit."""
    value, scale = {
        "SS": (figures.requests_per_minute, 1.0),
        "SL": (figures.tpot, 1e3),
        "LS": (figures.ttft, 1e3),
        "LL": (figures.slot_time, 1.0),
    }[name]
    return None if value is None else scale * value


Measure = Callable[[Record, Timeline, int], float | None]
"""What a request costs by a quadrant's metric: less is better. Given its record, its moments, and how many requests
were timed together with it."""


def _slot_time(line: Timeline) -> float | None:
    return None if line.finished is None else line.finished - line.admitted


def _share(record: Record, line: Timeline, together: int) -> float | None:
    """Its part of the time of its batch: requests per minute are requests over the sum of these."""
    return None if record.seconds is None else record.seconds / together


_MEASURES: dict[str, Measure] = {
    "SS": _share,
    "SL": lambda record, line, together: line.tpot,
    "LS": lambda record, line, together: line.ttft,
    "LL": lambda record, line, together: _slot_time(line),
}


def _gain(
    measure: Measure, own: Sequence[Record], plain: Sequence[Record], bootstrap: Bootstrap
) -> tuple[float | None, Interval | None]:
    """The mean of plain decoding over a method's, on the requests that both have, with its interval."""
    ours, theirs = _costs(measure, own), _costs(measure, plain)
    keys = [key for key in ours if key in theirs]
    if not keys:
        return None, None
    columns = [[theirs[key][1] for key in keys], [ours[key][1] for key in keys]]
    groups = [ours[key][0] for key in keys]
    if not sum(columns[1]):
        return None, None
    return sum(columns[0]) / sum(columns[1]), bootstrap.over_prompts(ratio_of_sums, groups, columns)


def _costs(measure: Measure, records: Sequence[Record]) -> dict[tuple[str, int, int], tuple[int, float]]:
    """By prompt, turn and sample: the batch, and the cost."""
    sizes: dict[tuple[int, int], int] = {}
    for record in records:
        sizes[record.batch, record.turn] = sizes.get((record.batch, record.turn), 0) + 1
    found = {}
    for record in records:
        line = timeline_of(record)
        value = None if line is None else measure(record, line, sizes[record.batch, record.turn])
        if value is not None:
            found[record.prompt, record.turn, record.sample] = (record.batch, value)
    return found


def _input(run: Run) -> int:
    tokens = run.manifest["config"]["dataset"].get("tokens")
    if tokens is None:
        raise ValueError(
            f"{run.folder} has no {INPUT}: quadrants need a dataset that makes prompts of one length, give "
            f"dataset=joined or dataset=context"
        )
    return int(tokens)


def _output(run: Run) -> int:
    return int(run.manifest["config"]["sampling"]["max_new_tokens"])


def _listed(values: Sequence[Any]) -> str:
    return ",".join(map(str, values))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
