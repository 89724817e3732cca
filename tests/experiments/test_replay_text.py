"""Drafters over known texts: what is accepted, counted by hand; what is read of a file; what is refused; the report."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from drafters import BlockDrafter, MergedDrafter, ModelDrafter, NGramDrafter, SuffixDrafter, TokenRecyclingDrafter
from experiments.datasets.answered import answered
from experiments.measuring.forced import Forced, TextTarget
from experiments.replay_text import replay_text
from experiments.reporting.replay_text import look_up, over
from experiments.results.frame import Figures
from experiments.results.statistics import Bootstrap
from specdec import Drafter, Outcome, SamplingParams
from specdec.checks.reference import reference_decode
from tests.components import block_head
from tests.experiments.conftest import byte_tokenizer
from tests.experiments.runs import Configure
from tests.models import tiny_model


def replayed(drafter: Drafter, *texts: tuple[Sequence[int], Sequence[int]]) -> list[list[int]]:
    """The accepted tokens of every round, text by text."""
    forced = Forced(drafter, TextTarget(byte_tokenizer(), "bytes"), 40)
    return [forced.replay(*text).accepted for text in texts]


@pytest.mark.parametrize("make", [lambda: NGramDrafter(max_draft_tokens=3, branches=1), lambda: SuffixDrafter(3)])
def test_rounds_are_those_of_a_target_that_answers_so(make) -> None:
    # 1 2 3 4 5 came before: after 1, the target's own token, three tokens are copied and 5 is the bonus token.
    assert replayed(make(), ([1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5])) == [[0, 3]]
    # The last token is left to the target.
    assert replayed(make(), ([1, 2, 3, 4, 5, 1], [2, 3])) == [[1]]
    assert replayed(make(), ([1], [2, 3, 4])) == [[0, 0, 0]]
    text = [1, 2, 3, 4]  # shared answers help the next one
    assert replayed(SuffixDrafter(4, shared=True), ([9], text), ([8], text)) == [[0, 0, 0, 0], [0, 2]]


def test_recycling_learns_from_the_answer_alone() -> None:
    """2 after 1 was emitted once, so it is drafted the next time; what the prompt has is known only behind a node."""
    assert replayed(TokenRecyclingDrafter(2), ([5, 6, 1], [2, 1, 2, 1, 2, 5])) == [[0, 0, 2, 0]]
    # The tree's second child of 1 is what else has followed 1: in the prompt.
    drafter = TokenRecyclingDrafter([(0,), (1,)])
    assert replayed(drafter, ([1, 7, 1, 7, 9, 1], [2, 1, 7, 3])) == [[0, 0, 1]]


def test_a_drafter_is_told_what_an_engine_would_tell_it() -> None:
    """The root and the accepted path, with their positions; the device's state of the next round follows."""
    seen: list[Outcome] = []
    roots: list[int] = []

    class Listens(NGramDrafter):
        top_tokens = 2

        def propose(self, slots):
            roots.append(int(slots.roots[0]))
            assert slots.lengths.tolist() == slots.on_host.lengths.tolist()
            return super().propose(slots)

        def observe(self, outcome: Outcome) -> None:
            seen.append(outcome)

    prompt, answer = [1, 2, 3, 4, 9], [1, 2, 3, 8, 8, 8]
    replayed(Listens(max_draft_tokens=3, branches=1), (prompt, answer))
    assert roots[:3] == [9, 1, 8]
    assert [each.path is None for each in seen[:2]] == [True, False], "the prompt comes first"
    assert [each.tokens.tolist() for each in seen[:3]] == [[[1, 2, 3, 4]], [[9]], [[1, 2, 3]]]
    assert [int(each.starts[0]) for each in seen[:4]] == [0, 4, 5, 8]
    assert [each.next_tokens.tolist() for each in seen[:3]] == [[9], [1], [8]]
    last = seen[2]
    assert last.node_tokens is not None and last.node_tokens.tolist() == [[1, 2, 3, 4]]
    assert last.node_valid is not None and last.node_valid.all()
    # On the answer's path its own next token comes first; 4 was rejected, and 9 is what has followed it.
    assert last.top_tokens is not None and last.top_tokens.tolist() == [[[2, -1], [3, -1], [8, 4], [9, -1]]]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda model: BlockDrafter(block_head(model)), "BlockDrafter"),
        (lambda model: MergedDrafter(NGramDrafter(), BlockDrafter(block_head(model))), "MergedDrafter"),
        (lambda model: SelfDrafter(), "SelfDrafter"),
    ],
)
def test_drafters_that_need_the_target_are_refused(make, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} cannot draft for texts alone"):
        Forced(make(tiny_model(vocab_size=257, layers=1)), TextTarget(byte_tokenizer(), "bytes"), 40)


class SelfDrafter(NGramDrafter):
    """Would draft with the target's own model."""

    def bind(self, target, sizes):
        self.model = target.model
        return self


def test_a_small_model_may_draft_too() -> None:
    """An answer that is its own greedy continuation is accepted to the end, which needs the prompt in its cache."""
    model = tiny_model(vocab_size=257, layers=1)
    prompt = [5, 9, 7, 30, 2]
    answer = reference_decode(model, prompt, SamplingParams(max_new_tokens=9).seeded(0))
    assert replayed(ModelDrafter(model, 2), (prompt, answer)) == [[2, 2, 2]]
    answer[4] = (answer[4] + 1) % 257
    assert replayed(ModelDrafter(model, 2), (prompt, answer))[0][:2] == [2, 1]


def written(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_answers_are_found_in_all_forms(tmp_path: Path) -> None:
    talk = [{"role": role, "content": text} for role, text in (("user", "l"), ("assistant", "m"), ("user", "n"))]
    rows: list[tuple[object, list[tuple[str, str, str]]]] = [
        (
            {"turns": ["a", "b", "c"], "category": "x", "reference": ["d", "", "e"]},
            [("x", "a\n", "d"), ("x", "a\nd\nb\n\nc\n", "e")],
        ),
        ({"prompt": "f", "answer": "g"}, [("none", "f\n", "g")]),
        ({"turns": ["h"]}, []),
        ({"turns": ["i"], "reference": [["j", "k"]]}, [("none", "i\n", "j, k")]),
        ({"messages": talk}, [("none", "l\n", "m")]),
        ({"conversations": [{"from": "gpt", "value": each} for each in ("first", "o")]}, [("none", "first\n", "o")]),
    ]
    file = written(tmp_path / "some.jsonl", [row for row, _ in rows])
    found = [(each.category, each.prompt, each.answer) for each in answered(str(file), "none")]
    assert found == [each for _, wanted in rows for each in wanted]
    with pytest.raises(ValueError, match="line 1 is not a JSON object"):
        list(answered(str(written(tmp_path / "bad.jsonl", [3])), "none"))


def rounds(category: str, count: int, tokens: int, nodes: int) -> Figures:
    return Figures(category=category, rounds=count, tokens=tokens, nodes=nodes)


def test_figures_by_hand() -> None:
    quick = Bootstrap(resamples=200)
    some = look_up("a", [rounds("x", 2, 6, 4), rounds("y", 4, 6, 0), rounds("x", 2, 2, 4)], quick)
    assert some.length == 14 / 8 and some.nodes == 1.0
    assert some.categories == {"x": 2.0, "y": 1.5}
    assert some.interval is not None and 1.0 <= some.interval[0] <= 1.75 <= some.interval[1] <= 3.0
    twice = look_up("b", [rounds(each.category, each.rounds, 2 * each.tokens, 0) for each in some.texts], quick)
    assert over(some, some, quick) == (0.0, 0.0)
    low, high = over(twice, some, quick) or (0.0, 0.0)
    assert (low, high) == pytest.approx(some.interval), "paired: the difference is once the figure itself"


def test_the_command_reports(
    configure: Configure, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "abcabc", "answer": "abcabcab"}, {"prompt": "xy", "answer": "yxyx", "category": "other"}]
    words = [f"texts=[{written(tmp_path / 'some.jsonl', rows)}]", f"tokenizer={saved}/target", f"out={tmp_path}/out"]
    words += ["drafters=[{name: suffix, label: mine}, recycling]", "bootstrap.resamples=100"]
    done = replay_text(configure("replay_text", *words))
    assert [each.label for each in done] == ["mine", "recycling"]
    assert sorted(text.category for text in done[0].texts) == sorted(done[0].categories) == ["other", "some"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "some.jsonl: 2 answers, 12 tokens" in shown and f"{done[0].length:.2f}" in shown
    kept = json.loads((tmp_path / "out" / "replay_text.json").read_text())
    assert [each["length"] for each in kept["drafters"]] == [each.length for each in done]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"replay_text.{kind}" for kind in ("csv", "json", "md", "png", "svg")
    ]
