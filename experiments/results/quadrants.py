"""Four kinds of requests, by the length of their input and output: what each is about, and what drafters do there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas

from experiments.results.frame import Frame, frame_of
from experiments.results.records import PLAIN
from experiments.results.runs import Run, records_of
from experiments.results.statistics import Bootstrap, Interval, ratio_of_sums
from experiments.results.summary import MethodSummary

INPUT, OUTPUT = "dataset.tokens", "sampling.max_new_tokens"
"""The settings in which the four runs differ."""


@dataclass(frozen=True)
class Metric:
    """The figure that a quadrant is about.

    Attributes:
        name, meaning: In a table, and in a sentence.
        unit: Its unit.
        field, scale: The field of ``Figures`` that has it, and what takes that to the unit.
    """

    name: str
    meaning: str
    unit: str
    field: str
    scale: float


METRICS = {
    "SS": Metric("requests/min", "requests per minute", "per minute", "requests_per_minute", 1.0),
    "SL": Metric("TPOT", "time per output token after the first", "ms", "tpot", 1e3),
    "LS": Metric("TTFT", "time to first token", "ms", "ttft", 1e3),
    "LL": Metric("slot time", "time that a request holds its slot", "s", "slot_time", 1.0),
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
    """Return the quadrants of four runs, at every temperature, in the order SS, SL, LS, LL.

    Args:
        runs: One for each pair of two input lengths and two output lengths; fewer, if some have failed.
        bootstrap: Settings of the intervals.

    Raises:
        ValueError: The runs do not have two lengths of each, or two runs have the same.
    """
    lengths = [(_input(run), _output(run)) for run in runs]
    inputs, outputs = (sorted({pair[side] for pair in lengths}) for side in (0, 1))
    if len(inputs) != 2 or len(outputs) != 2 or len(set(lengths)) < len(lengths):
        these = f"{INPUT}={','.join(map(str, inputs))} and {OUTPUT}={','.join(map(str, outputs))} in {len(runs)} runs"
        raise ValueError(
            f"quadrants need runs at two input lengths and two output lengths, each pair once, and these have {these}: "
            f"give {INPUT}=64,640 {OUTPUT}=16,160"
        )
    found = []
    for run, (length, most) in zip(runs, lengths, strict=True):
        name = ("L" if length == inputs[1] else "S") + ("L" if most == outputs[1] else "S")
        frame = frame_of(records_of(run.folder)) if run.frame is None else run.frame
        for temperature in sorted({method.temperature for method in run.summary.methods}):
            found.append(_quadrant(name, run, temperature, frame, bootstrap))
    order = list(METRICS)
    return sorted(found, key=lambda each: (each.temperature, order.index(each.name)))


def _quadrant(name: str, run: Run, temperature: float, frame: Frame, bootstrap: Bootstrap) -> Quadrant:
    summaries = [method for method in run.summary.methods if method.temperature == temperature]
    good = _with_costs(frame[(frame.temperature == temperature) & ~frame.failed])
    plain = good[good.method == PLAIN]
    shown = good if plain.empty else plain
    inputs, outputs = (_mean(shown[column]) or 0.0 for column in ("prompt_tokens", "tokens"))
    per_position = run.manifest["target"].get("kv_bytes_per_position")
    methods = [_figures(name, method, good[good.method == method.method], plain, bootstrap) for method in summaries]
    return Quadrant(
        name=name,
        run=run,
        temperature=temperature,
        input_tokens=inputs,
        output_tokens=outputs,
        asked=_output(run),
        kv_begin=None if per_position is None else per_position * inputs,
        kv_end=None if per_position is None else per_position * (inputs + outputs),
        methods=tuple(sorted(methods, key=lambda each: each.method != PLAIN)),
    )


def _with_costs(good: Frame) -> Frame:
    """Add what a request costs by each quadrant's metric, where less is better, as columns of the quadrants' names."""
    # A request's part of the time of its call: requests per minute are requests over the sum of these.
    together = good.groupby(["method", "batch", "turn"]).prompt.transform("size")
    return good.assign(SS=good.seconds.where(good.told) / together, SL=good.tpot, LS=good.ttft, LL=good.slot_time)


def _figures(name: str, method: MethodSummary, own: Frame, plain: Frame, bootstrap: Bootstrap) -> Figures:
    rate = None if method.requests is None else method.requests.requests_per_second
    found = Figures(
        method=method.method,
        summary=method,
        requests_per_minute=None if rate is None else 60 * rate,
        ttft=_mean(own.ttft),
        tpot=_mean(own.tpot),
        slot_time=_mean(own.slot_time),
    )
    value = getattr(found, METRICS[name].field)
    gain, interval = (None, None) if method.method == PLAIN else _gain(name, own, plain, bootstrap)
    return replace(found, own=None if value is None else METRICS[name].scale * value, gain=gain, gain_interval=interval)


def _gain(name: str, own: Frame, plain: Frame, bootstrap: Bootstrap) -> tuple[float | None, Interval | None]:
    """The mean cost of plain decoding over a method's, on the requests that both have, with its interval."""
    keys = ["prompt", "turn", "sample"]
    both = own.dropna(subset=[name]).merge(plain.dropna(subset=[name])[[*keys, name]], on=keys, suffixes=("", "_plain"))
    if not both[name].sum():
        return None, None
    columns = [both[f"{name}_plain"], both[name]]
    return float(columns[0].sum() / columns[1].sum()), bootstrap.over_prompts(ratio_of_sums, both.batch, columns)


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


def _mean(values: pandas.Series) -> float | None:
    return float(values.mean()) if values.notna().any() else None
