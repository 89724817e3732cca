"""Workloads, and arrival processes: their laws, with mutants that the same tests must reject."""

import gzip
import string
from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy.stats import kstest

from experiments.datasets.joined import Texts
from experiments.datasets.prompt import Prompt
from experiments.load.arrivals import Arrivals, Gaps, Spike, Times, Trace, Users, read
from experiments.load.run import OPEN
from experiments.load.workloads import AsRecorded, Chats, Mix, Planned, ask, fitted
from specdec.requests import SamplingParams
from tests.experiments.conftest import byte_tokenizer

COUNT = 4000
REJECTED = 1e-4
"""Fits below this are none: a right process is below it once in 10,000 seeds, and the seed is fixed."""


def drawn(arrivals: Arrivals, count: int = COUNT, seed: int = 7) -> Times:
    return arrivals.times(np.random.default_rng(seed), count)


@pytest.mark.parametrize(
    ("cv", "mutants"),
    [
        (1.0, [Gaps(rate=3.4), Gaps(rate=3, cv=1.2), Gaps(rate=3, cv=0)]),
        (2.0, [Gaps(rate=4, cv=2), Gaps(rate=3, cv=2.6), Gaps(rate=3)]),
        (0.5, [Gaps(rate=3, cv=0.6), Gaps(rate=3)]),
    ],
)
def test_gaps_have_their_mean_and_variation(cv: float, mutants: list[Arrivals]) -> None:
    def fit(arrivals: Arrivals) -> float:
        gaps = np.diff(drawn(arrivals), prepend=0.0)
        return float(kstest(gaps, "gamma", args=(1 / cv**2, 0, cv**2 / 3)).pvalue)

    assert fit(Gaps(rate=3, cv=cv)) > 0.01
    assert all(fit(mutant) < REJECTED for mutant in mutants)


@pytest.mark.parametrize("factor", [6.0, 0.1])
def test_a_spike_raises_the_rate_in_its_window(factor: float) -> None:
    """In expected arrivals its times are those of a Poisson process with rate 1."""

    def fit(times: Times, factor: float) -> float:
        expected = 3 * (times + (factor - 1) * np.clip(times - 50, 0, 100))
        gaps = kstest(np.diff(expected, prepend=0.0), "expon").pvalue
        return float(min(gaps, kstest(expected[:-1] / expected[-1], "uniform").pvalue))

    times = drawn(Spike(rate=3, factor=factor, begin=50, length=100))
    assert fit(times, factor) > 0.01
    assert fit(times, 0.8 * factor if factor > 1 else 1.0) < REJECTED, "another height of the same shape"
    assert fit(drawn(Gaps(rate=COUNT / times[-1])), factor) < REJECTED, "the same mean without a spike"


@pytest.mark.parametrize("arrivals", [Gaps(), Spike(), Users(think=1.0)])
def test_a_seed_decides_everything(arrivals: Arrivals) -> None:
    times = drawn(arrivals, 50)
    assert (drawn(arrivals, 50) == times).all() and (drawn(arrivals, 50, seed=8) != times).any() and len(times) == 50
    if arrivals.loop == OPEN:
        assert (np.diff(times) >= 0).all() and times[0] >= 0
        assert drawn(arrivals.at_rate(10 * arrivals.rate))[-1] < 0.2 * drawn(arrivals)[-1]


def test_users_begin_at_once_and_think_later() -> None:
    times = drawn(Users(rate=3, think=2.0))
    assert (times[:3] == 0).all() and float(kstest(times[3:], "expon", args=(0, 2.0)).pvalue) > 0.01


AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
2024-05-10 00:00:01+00:00,76,15
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,"API, log"
118,GPT-4,417,276,693,API log
"""


def written(folder: Path, content: str | bytes, name: str = "trace") -> Path:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / name


@pytest.mark.parametrize(
    ("text", "times", "inputs", "outputs"),
    [
        (AZURE_2023, [0, 4.314579, 4.541977], [374, 396, 879], [44, 109, 1]),
        (AZURE_2024, [0, 0.007405, 0.99007], [2162, 2399, 76], [5, 6, 15]),
        (BURST, [0, 40, 113], [472, 1087, 417], [18, 230, 276]),
    ],
)
def test_public_formats(text: str, times: list[float], inputs: list[int], outputs: list[int], tmp_path: Path) -> None:
    for name, content in (("trace.csv", text), ("trace.csv.gz", gzip.compress(text.encode()))):
        found = read(written(tmp_path, content, name))
        np.testing.assert_allclose(found.time, times, atol=1e-6)
        assert found.inputs.tolist() == inputs and found.outputs.tolist() == outputs, "answers have a token"


def test_a_window_and_a_rate(tmp_path: Path) -> None:
    path = str(written(tmp_path, BURST))
    part = Trace(path=path, window=[30.0, 120.0], scale=2.0)
    assert part.times(np.random.default_rng(0), 9).tolist() == [0, 36.5], "the first in the window comes at 0"
    assert part.recorded.inputs.tolist() == [1087, 417] and part.rate == 1 / 36.5
    faster = part.at_rate(8.0)
    assert faster.rate == pytest.approx(8.0) and faster.recorded.time.iloc[-1] == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"cannot be read \(No columns to parse from file\), give a file or one of azure_code, azure_conversation"),
        ("when,how\n1,2\n", "no requests in known columns: give a trace that begins with TIMESTAMP,"),
        (AZURE_2023.replace("18:15:51.2", "18:15:49.2"), "line 4 is earlier than the one before"),
        (BURST.replace("1087", "inf"), "line 3 is '45,inf,230': give"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said_with_its_line(content: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ValueError, match=rf"^arrival\.path={path}.*{message}.*\Z"):
        read(path)


def test_classes_have_their_shares_and_lengths_their_spread() -> None:
    def share_of_short(**shares: float) -> float:
        classes = {name: {"share": share, "input": 60, "output": 8} for name, share in shares.items()}
        planned = Mix(classes).plan(np.random.default_rng(0), 4000)
        return float(np.mean([each.klass == "short" for each in planned]))

    def moments(spread: float, name: str) -> tuple[float, float]:
        planned = Mix({"a": {"input": 200, "output": 80, "spread": spread}}).plan(np.random.default_rng(1), 4000)
        found = np.array([getattr(each, name) for each in planned])
        return found.mean() / {"prompt_tokens": 200, "output_tokens": 80}[name], found.std() / found.mean()

    assert share_of_short(short=3, long=1) == pytest.approx(0.75, abs=0.028), "four standard errors"
    assert share_of_short(short=3, long=1.3) != pytest.approx(0.75, abs=0.028), "another share"
    for name in ("prompt_tokens", "output_tokens"):
        assert moments(0.0, name) == (1.0, 0.0)
        assert moments(0.5, name) == pytest.approx((1.0, 0.5), abs=0.04), "spread leaves the mean alone"
        assert moments(0.6, name)[1] != pytest.approx(0.5, abs=0.04)


def test_a_class_gives_its_requests_what_schedulers_ask_for() -> None:
    tiers = Mix({"now": {"priority": 0, "deadline": 2.0}, "later": {"priority": 5}})
    planned = tiers.plan(np.random.default_rng(0), 60)
    assert {(each.klass, each.priority, each.deadline) for each in planned} == {("now", 0, 2.0), ("later", 5, None)}
    assert [each.pieces[0][0] for each in planned] == list(range(60)), "no two prompts begin alike"
    assert planned == tiers.plan(np.random.default_rng(0), 60) != tiers.plan(np.random.default_rng(1), 60)
    asked = [each.sampling for each in ask(planned[:20], texts(), SamplingParams(temperature=0.5, n=4))]
    assert [each.stream for each in asked] == list(range(20)) and all(each.n == 1 for each in asked)
    told = {(each.priority, each.deadline, each.max_new_tokens, each.temperature) for each in asked}
    assert told == {(0, 2.0, 64, 0.5), (5, None, 64, 0.5)}


def test_chats_begin_with_their_system_prompt_and_all_that_was_said() -> None:
    planned = Chats(systems=2, system=50, turns=3, said=7, output=5, open=4).plan(np.random.default_rng(0), 80)
    last: dict[int, Planned] = {}  # of every conversation, by the number of what the user said first
    for each in planned:
        turn = int(each.klass.removeprefix("turn "))
        assert each.prompt_tokens == 50 + 7 + (turn - 1) * 12 and each.output_tokens == 5
        assert each.pieces[0] in {(0, 50), (1, 50)}
        if turn > 1:
            before = last[each.pieces[1][0]].pieces
            assert each.pieces[: len(before)] == before
            assert each.pieces[len(before)] == (before[-1][0] + 1, 5), "then comes the answer"
        last[each.pieces[1][0]] = each
    own = [number for each in last.values() for number, _ in each.pieces[1:]]
    assert len(set(own)) == len(own), "nothing else is shared"
    assert {each.klass for each in planned} == {"turn 1", "turn 2", "turn 3"} and len(last) > 20


def test_lengths_are_the_traces_scaled_then_cut() -> None:
    recorded = pandas.DataFrame({"inputs": [700, 600, 90], "outputs": [4, 5, 6]})
    planned = AsRecorded().plan(np.random.default_rng(0), 2, recorded)
    assert [(each.pieces, each.output_tokens) for each in planned] == [(((0, 700),), 4), (((1, 600),), 5)]
    asks = [Planned(klass="a", pieces=((0, 60), (1, 60)), output_tokens=tokens) for tokens in (20, 60, 400)]
    halves, cut = fitted(asks, 100, 0.5)
    assert [(each.prompt_tokens, each.output_tokens) for each in halves] == [(60, 10), (60, 30), (50, 50)]
    assert cut == 1 and halves[2].pieces == ((0, 30), (1, 20)), "a prompt from its end on"
    assert fitted(asks[2:], 50, 1.0)[0][0].pieces == ((0, 25),)


def texts(seed: int = 0, template: str | None = None) -> Texts:
    """26 texts of 40 tokens, each of a letter of its own."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    prompts = [Prompt(id=letter, turns=(letter * 40,), chat=template is not None) for letter in string.ascii_lowercase]
    return Texts(prompts, tokenizer, np.random.default_rng(seed))


def test_prompts_are_as_long_as_asked_and_one_number_is_one_text() -> None:
    """No text comes twice before all have been there, and the seed decides which comes first."""
    made, seen = texts(), set()
    for number, size in enumerate([40, 1, 55, 90, 41, 40, 130, 7]):
        ids = made.prompt(((number, size),))
        letters = set(byte_tokenizer().decode(ids)) & set(string.ascii_lowercase)
        assert len(ids) == size and not letters & seen
        seen |= letters
    assert made.passes < 1 and len(made.prompt(((1000, 5000),))) == 5000, "longer than all texts"
    made = texts()
    first, second, short = (made.prompt(pieces) for pieces in (((0, 90), (1, 40)), ((0, 90), (2, 40)), ((0, 30),)))
    assert first[:90] == second[:90] and short == first[:30] and first[90:] != second[90:]
    assert texts().prompt(((0, 90), (1, 40))) == first != texts(seed=1).prompt(((0, 90), (1, 40)))


def test_the_chat_template_stands_around_every_prompt_and_counts() -> None:
    made = texts(template="<s>user: {{ messages[0].content }}</s>assistant:")
    for number, size in enumerate((60, 30)):
        text = str(byte_tokenizer().decode(ids := made.prompt(((number, size),))))
        assert len(ids) == size and text.startswith("<s>user: ") and text.endswith("</s>assistant:")
