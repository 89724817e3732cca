"""Counters and histograms under the names that dashboards and clients of other servers know."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from experiments.serving.answers import Choice
from specdec.types import Step

SECONDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5))
_TIMES = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    "request_decode_time_seconds",
)
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_COUNTS = (
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)


class Metrics(Collector):
    """The metrics of a server. All methods belong to the event loop's thread.

    Args:
        prefix: Stands before every name: ``specdec``, or ``vllm`` for what looks for that.
        state: Returns gauges, and counters of the engine, by name.
    """

    def __init__(self, *, prefix: str, model: str, state: Callable[[], Mapping[str, float]]):
        self._prefix, self._labels, self._state = f"{prefix}:", {"model_name": model}, state
        self._registry = CollectorRegistry()
        self._counts: Counter[str] = Counter()
        self._accepted: Counter[int] = Counter()
        self._ended: Counter[str] = Counter()
        self._times = {name: self._histogram(name) for name in _TIMES}
        self._registry.register(self)

    def _histogram(self, name: str) -> Histogram:
        words = name.replace("_", " ")
        made = Histogram(self._prefix + name, words, ["model_name"], registry=self._registry, buckets=SECONDS)
        return made.labels(**self._labels)

    def turn(self, steps: Sequence[tuple[Choice, Step]]) -> None:
        """Note the rounds of a turn, which their choices do not know of yet."""
        counts = self._counts
        for choice, step in steps:
            first, last, tokens = choice.first or step.visible, choice.last, choice.tokens + len(step.token_ids)
            counts["prompt_tokens"] += 0 if choice.tokens else len(choice.prompt)
            counts["generation_tokens"] += len(step.token_ids)
            if step.token_ids and last:
                self._times["inter_token_latency_seconds"].observe(step.visible - last)
            elif step.token_ids:
                self._times["time_to_first_token_seconds"].observe(step.visible - choice.call.arrived)
            if step.proposed_depth and step.error is None:
                counts["spec_decode_num_drafts"] += 1
                counts["spec_decode_num_draft_tokens"] += step.proposed_depth
                counts["spec_decode_num_accepted_tokens"] += step.accepted
                self._accepted.update(range(step.accepted))
            if step.finish_reason is not None:
                self._ended[step.finish_reason] += 1
            if (stamps := step.timestamps) is not None and step.finish_reason != "error":
                ended = {
                    "request_queue_time": stamps.admitted - stamps.arrived,
                    "request_prefill_time": first - stamps.admitted,
                    "request_decode_time": step.visible - first,
                    "e2e_request_latency": step.visible - stamps.arrived,
                    **({"request_time_per_output_token": (step.visible - first) / (tokens - 1)} if tokens > 1 else {}),
                }
                for name, seconds in ended.items():
                    self._times[f"{name}_seconds"].observe(seconds)

    def aborted(self) -> None:
        """Note that a client has left before the end."""
        self._ended["abort"] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield what is no histogram; called by the registry."""
        state = {**self._counts, **self._state()}
        for name in _GAUGES:
            yield self._family(GaugeMetricFamily, name, {"": state[name]})
        for name in _COUNTS:
            yield self._family(CounterMetricFamily, name, {"": state.get(name, 0)})
        positions = {str(position): count for position, count in sorted(self._accepted.items())}
        yield self._family(CounterMetricFamily, "spec_decode_num_accepted_tokens_per_pos", positions, "position")
        yield self._family(CounterMetricFamily, "request_success", self._ended, "finished_reason")

    def _family(self, kind: Any, name: str, values: Mapping[str, float], *label: str) -> Metric:
        family = kind(self._prefix + name, name.replace("_", " "), labels=[*self._labels, *label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *([key] if label else [])], value)
        return family

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
