"""Counters and histograms under the names that dashboards and clients of other servers know."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from experiments.serving.calls import Choice
from specdec.types import Step

SECONDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5))
TOKENS = tuple(2.0**power for power in range(15))
_TIMES = {
    "time_to_first_token_seconds": "From the arrival to the first token.",
    "inter_token_latency_seconds": "Between two deliveries of tokens; a round delivers one or several.",
    "request_time_per_output_token_seconds": "From the first token to the last, per token after the first.",
    "e2e_request_latency_seconds": "From the arrival to the last token.",
    "request_queue_time_seconds": "From the arrival to a slot of the engine.",
    "request_prefill_time_seconds": "From the slot to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
}
_COUNTS = {
    "prefix_cache_queries": "Prompt tokens that could have been in the cache.",
    "prefix_cache_hits": "Prompt tokens that were in the cache.",
    "num_preemptions": "Requests that lost their slot.",
    "prompt_tokens": "Prompt tokens of requests that have begun.",
    "generation_tokens": "Output tokens.",
    "spec_decode_num_drafts": "Rounds with a draft.",
    "spec_decode_num_draft_tokens": "Depths of drafts, added up.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "engine_turns": "Turns of the engine.",
    "engine_seconds": "Seconds in the engine's turns.",
    "serving_seconds": "Seconds of the engine's thread between two turns.",
    "event_loop_cpu_seconds": "CPU seconds of the thread that speaks HTTP.",
}


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
        self._times = {name: self._histogram(name, said, SECONDS) for name, said in _TIMES.items()}
        self._tokens = self._histogram("iteration_tokens_total", "Output tokens of a turn.", TOKENS)
        self._registry.register(self)

    def _histogram(self, name: str, said: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(self._prefix + name, said, ["model_name"], registry=self._registry, buckets=buckets)
        return made.labels(**self._labels)

    def turn(self, steps: Sequence[tuple[Choice, Step]]) -> None:
        """Note the rounds of a turn together."""
        self._tokens.observe(sum(len(step.token_ids) for _, step in steps))

    def step(self, choice: Choice, step: Step) -> None:
        """Note a round of a choice, which does not know of it yet."""
        counts, times = self._counts, self._times
        if not choice.rounds:
            counts["prompt_tokens"] += len(choice.prompt)
        if step.token_ids:
            counts["generation_tokens"] += len(step.token_ids)
            if choice.last:
                times["inter_token_latency_seconds"].observe(step.visible - choice.last)
            else:
                times["time_to_first_token_seconds"].observe(step.visible - choice.call.arrived)
        if step.proposed_depth and step.error is None:
            counts["spec_decode_num_drafts"] += 1
            counts["spec_decode_num_draft_tokens"] += step.proposed_depth
            counts["spec_decode_num_accepted_tokens"] += step.accepted
            self._accepted.update(range(step.accepted))
        if step.finish_reason is not None:
            self._ended[step.finish_reason] += 1
            self._end(choice, step)

    def _end(self, choice: Choice, step: Step) -> None:
        stamps, first, tokens = step.timestamps, choice.first or step.visible, choice.tokens + len(step.token_ids)
        if stamps is None or step.finish_reason == "error":
            return
        times = self._times
        times["request_queue_time_seconds"].observe(stamps.admitted - stamps.arrived)
        times["request_prefill_time_seconds"].observe(first - stamps.admitted)
        times["request_decode_time_seconds"].observe(step.visible - first)
        times["e2e_request_latency_seconds"].observe(step.visible - stamps.arrived)
        if tokens > 1:
            times["request_time_per_output_token_seconds"].observe((step.visible - first) / (tokens - 1))

    def aborted(self) -> None:
        """Note that a client has left before the end."""
        self._ended["abort"] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield what is no histogram; called by the registry."""
        state = {**self._counts, **self._state(), "event_loop_cpu_seconds": time.thread_time()}
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            gauge = GaugeMetricFamily(self._prefix + name, name.replace("_", " "), labels=[*self._labels])
            gauge.add_metric([*self._labels.values()], state[name])
            yield gauge
        for name, said in _COUNTS.items():
            yield self._family(name, said, None, {"": state.get(name, 0)})
        positions = {str(position): count for position, count in sorted(self._accepted.items())}
        said = "Drafts of which the token at this position was accepted."
        yield self._family("spec_decode_num_accepted_tokens_per_pos", said, "position", positions)
        yield self._family("request_success", "Requests that have ended.", "finished_reason", self._ended)

    def _family(self, name: str, said: str, label: str | None, values: Mapping[str, float]) -> CounterMetricFamily:
        family = CounterMetricFamily(self._prefix + name, said, labels=[*self._labels, *([label] if label else [])])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *([key] if label else [])], value)
        return family

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
