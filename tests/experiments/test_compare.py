"""Runs side by side: what may be compared, how rows are named; the page in HTML, also in a real browser."""

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas
import pytest

from experiments import results
from experiments.commands import settings
from experiments.compare import compare
from experiments.datasets.prompt import Prompt
from experiments.measuring.jobs import template_facts
from experiments.reporting.comparison import report_comparison
from experiments.reporting.report.page import outputs_to_show, write_page
from experiments.reporting.run_plots import acceptance_plot
from experiments.results.records import read_records
from experiments.results.runs import load_run
from experiments.results.texts import TOKENS, read_token_texts
from experiments.run import run
from tests.experiments.conftest import byte_tokenizer, called
from tests.experiments.made_runs import HOSTILE, OUTPUT, loaded, made, write_run
from tests.experiments.runs import launched


def test_the_table_in_every_format_and_the_pictures(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for name, temperature in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
        shape, pace = ("[2,1]", 1) if name in "ab" else ("4", 2)
        words = ["drafter=model", f"drafter.shape={shape}", f"sampling.temperature={temperature}"]
        made(tmp_path / name, *words, pace=pace)
    out = tmp_path / "out"
    words = [f"runs=[{','.join(str(tmp_path / name) for name in 'abcd')}]", "format=[md,csv,latex,parquet]"]
    words += [f"out={out}", f"hydra.run.dir={tmp_path / 'hydra'}"]
    assert launched(*words, monkeypatch=monkeypatch, main=settings.compare.main) == 0
    assert {path.name for path in out.iterdir()} == {
        *(f"comparison.{ending}" for ending in ("md", "csv", "tex", "parquet", "json", "png", "svg")),
        "acceptance.png", "acceptance.svg", "differences.md", "differences.csv", "two_way.md",
    }  # fmt: skip
    found = json.loads((out / "comparison.json").read_text())
    names = [(row["temperature"], row["name"]) for row in found["rows"]]
    assert names == [(t, f"model, drafter.shape={shape}") for t in (0, 1) for shape in ("[2,1]", "4")]
    # 18 tokens in 3.3 s against 6 s.
    assert found["rows"][0]["speedup"] == pytest.approx(6 / 3.3)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("1.82x", "acceptance rule: exact", "to plain")), "no column is cut off"
    text = (out / "comparison.md").read_text()
    assert "| 0 | model, drafter.shape=[2,1] | 2.11 [2.00, 2.33] | 1.82x [1.67, 2.00] |" in text
    assert "at commit 0123456789 with `drafter=model`" in text
    tex = (out / "comparison.tex").read_text()
    assert r"\bfseries 1.82x [1.67, 2.00]" in tex
    assert "bold: the largest figure of the exact methods at a temperature" in tex

    table = pandas.read_parquet(out / "comparison.parquet")
    loaded_again = results.load(*(tmp_path / name for name in "acbd")).runs
    of_methods = loaded_again.query("method != 'plain'").reset_index(drop=True)
    # Families of columns that only plain decoding's rows have are not in the comparison, and no other column is amiss.
    pandas.testing.assert_frame_equal(table.drop(columns="name"), of_methods[table.columns.drop("name")])
    assert list(pandas.read_csv(out / "comparison.csv").speedup) == list(table.speedup), "CSV has every digit"


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"target": {"name": "other"}}, r"differ in their target: bundled/target \(a\), other \(b\)"),
        ({"prompts_hash": "x"}, r"differ in their dataset: stdlib, 3 prompts, seed 0 \(a\), stdlib"),
        ({"dtype": "bfloat16"}, r"differ in their dtype: float32 \(a\), bfloat16 \(b\)"),
        ({"template": {"enable_thinking": True, "hash": "x"}}, "differ in their chat template: .*enable_thinking=True"),
    ],
)
def test_unlike_runs_are_refused_unless_told_to_and_then_it_is_said(facts, message: str, tmp_path, capsys) -> None:
    runs = [loaded(tmp_path / "a"), loaded(tmp_path / "b", planned=4, device="another", **facts)]
    with pytest.raises(ValueError, match=message + r".*: allow_mixed=true compares them"):
        report_comparison(runs, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report_comparison(runs, tmp_path / "out", allow_mixed=True, formats=["latex"])
    tex = (tmp_path / "out" / "comparison.tex").read_text()
    assert r"\bfseries" not in tex and "MIXED: the runs differ in their" in tex
    shown = " ".join(capsys.readouterr().out.split())
    assert f"INCOMPLETE: {tmp_path / 'b'} has not finished its 4 prompts" in shown
    assert "different devices (a processor, another)" in shown


TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif -%}"
)
"""A template like Qwen3's: without thinking, the answer begins with an empty thought."""


@pytest.mark.usefixtures("no_pictures")
def test_arguments_of_the_chat_template_reach_conversations_alone(saved, configure, tiny, tmp_path: Path) -> None:
    shutil.copytree(saved / "target", tmp_path / "thinker")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "thinker")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"turns": ["2 + 2?"]}) + "\n")
    words = [text for text in tiny if not text.startswith(("target", "dataset"))]
    words += [f"target.name={tmp_path / 'thinker'}", "dataset=jsonl", f"dataset.file={tmp_path / 'rows.jsonl'}"]
    words += ["chat_template={enable_thinking: false}", "drafter=none", "method=none", "warmup_prompts=0"]
    run(configure("run", *words))
    assert load_run(tmp_path / "out").manifest["template"]["enable_thinking"] is False
    (record,) = read_records(tmp_path / "out" / "records.jsonl")
    said = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert record.prompt_tokens == len(said), "one token per letter"
    text = Prompt(id="b", turns=("def f(",))
    assert template_facts([text], tokenizer, {"anything": 1}) is None, "a pair's arguments do not hinder other prompts"
    with pytest.raises(ValueError, match="the target's tokenizer has none, so arguments would change nothing"):
        template_facts([text], byte_tokenizer(), {"anything": 1})


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.data = "", ""
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = [tag, str(dict(attrs).get("id"))]

    def handle_data(self, data: str) -> None:
        if self._inside == ["script", "data"]:
            self.data += data
        elif self._inside[:1] not in (["style"], ["script"]):
            self.text += data


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """One test draws them; drawing takes most of the others' time."""
    monkeypatch.setattr("experiments.reporting.report.page.pictures", lambda entries, out, subtitle: [])


def page_of(tmp_path: Path, *words: str) -> Page:
    called(compare, *words, "format=html", f"out={tmp_path / 'page'}")
    return Page((tmp_path / "page" / "report.html").read_text(encoding="utf-8"))


def test_hostile_texts_stay_texts_and_nothing_is_asked_of_a_network(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.undo()
    folder = write_run(tmp_path / "run", device=HOSTILE, dtype_reason=HOSTILE, overrides=[HOSTILE])
    acceptance_plot(load_run(folder), folder / "acceptance_by_position.png", "")
    page = page_of(tmp_path, str(folder))
    assert page.text.count(HOSTILE) >= 3, "where facts are shown, as text"
    assert [tag for tag, _ in page.tags].count("script") == 2, "the data and the code"
    assert [attributes["alt"] for tag, attributes in page.tags if tag == "img"] == ["acceptance by position"]
    (policy,) = (str(a["content"]) for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert (rules["default-src"], rules["img-src"]) == ("'none'", "data:")
    assert {name for name in rules if name.endswith("-src")} == {"default-src", "img-src", "style-src", "script-src"}
    for tag, attributes in page.tags:
        for name in ("src", "href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), f"<{tag} {name}={value}>"
    assert "<" not in page.data
    data = json.loads(page.data)
    (shown,) = data["runs"]
    assert shown["prompts"][2] == shown["prompts"][2] | {"id": f"last {HOSTILE}", "turns": [f"say last {HOSTILE}"]}
    assert shown["texts"]["2"] == HOSTILE

    drafted = next(each for each in shown["outputs"] if each["method"] == "model")
    assert tuple(drafted["k"]) == OUTPUT
    sources = [data["sources"][number] for number in drafted["s"]]
    assert sources == ["accepted", "accepted", "bonus", "accepted", "recovered", "accepted", "bonus"]
    assert drafted["x"] == {"1": "▯", "2": "→"}, "a character over two tokens"
    drawn = drafted["rounds"][1]
    assert (drawn["up"], drawn["path"], drawn["next"][0]) == ([-1, 0, 0, 1], [1], 7)
    assert 0 < drawn["p"][1] < 1


def test_runs_side_by_side_their_verdicts_and_the_limit_of_prompts(tmp_path: Path) -> None:
    write_run(tmp_path / "sweep" / "0", prompts=4, trace=False, temperature=0.0)
    write_run(tmp_path / "sweep" / "1", prompts=4, overrides=["drafter=ngram"], dtype="bfloat16")
    page = page_of(tmp_path, str(tmp_path / "sweep"), "max_prompts=2")
    shown = {run["name"]: [each["id"] for each in run["prompts"]] for run in json.loads(page.data)["runs"]}
    assert shown == {"0": ["p0"], "drafter=ngram": ["p0"]}
    for text in ("1 of 4 prompts of drafter=ngram are shown", "0: No trace", "the runs differ in their dtype",
                 "NOT LOSSLESS", "of 4 outputs leave plain decoding's by more than", "margin 0.5 nats",
                 "nobody/nothing (1.5M parameters)", "0123456789 with changes", "a processor"):  # fmt: skip
        assert text in page.text, text
    rows = [a["data-category"] for tag, a in page.tags if tag == "tr" and "data-category" in a]
    assert set(rows) == {"all", "c0", "c1"}
    none = json.loads(page_of(tmp_path, str(tmp_path / "sweep"), "max_prompts=0").data)
    assert [run["outputs"] for run in none["runs"]] == [[], []]


def test_a_run_leaves_what_the_report_needs(traced_out: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(traced_out, folder)
    (shown,) = json.loads(page_of(tmp_path, str(folder)).data)["runs"]
    records = read_records(folder / "records.jsonl")
    assert len(shown["outputs"]) == len(records) == 6
    assert not [text for text in shown["texts"].values() if re.fullmatch(r"<\d+>", text)], "every token has its text"
    assert all(prompt["turns"] for prompt in shown["prompts"])
    for each, record in zip(shown["outputs"], records, strict=True):
        words = [each["x"].get(str(i), shown["texts"][str(token)]) for i, token in enumerate(each["k"])]
        assert "".join(word for word in words if word != "▯").startswith(record.text.rstrip("\ufffd"))
    (folder / TOKENS).unlink()
    again = json.loads(page_of(tmp_path, str(folder)).data)
    assert again["runs"][0]["texts"] == {token: f"<{token}>" for token in shown["texts"]}, "a page reads folders alone"


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync --disable-dev-shm-usage"
FLAGS += " --disable-background-networking --disable-component-update --window-size=1400,1000"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    """A report on a greedy run with a trace and one drawn without; it logs no error, and asks for nothing else."""
    if BROWSER is None or DRIVER is None:
        pytest.skip("needs a browser and its driver: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install '.[dev]'")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    path = tmp_path / "report.html"
    greedy = write_run(tmp_path / "greedy", temperature=0.0)
    runs = [load_run(greedy), load_run(write_run(tmp_path / "drawn", trace=False))]
    outputs, notes = outputs_to_show(runs, 100)
    write_page(runs, outputs, [read_token_texts(run.folder) for run in runs], path, notes=notes)
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER)) as driver:
        driver.get("about:blank")
        driver.get_log("performance")  # forget what the browser itself has shown before
        driver.get(path.as_uri())
        title = driver.title
        yield driver
        assert driver.title == title, "a text of the run was executed"
        assert driver.get_log("browser") == []
        asked = [
            message["params"]["request"]["url"]
            for entry in driver.get_log("performance")
            if (message := json.loads(entry["message"])["message"])["method"] == "Network.requestWillBeSent"
        ]
        assert path.as_uri() in asked, "the log has the requests"
        assert [url for url in asked if not url.startswith(("data:", path.as_uri()))] == []


def all_of(page: Any, selector: str) -> list[Any]:
    return page.find_elements("css selector", selector)


def texts(page: Any, selector: str) -> list[str]:
    return [each.text for each in all_of(page, selector) if each.is_displayed()]


def classes(page: Any, selector: str) -> list[str]:
    """The kinds of tokens or nodes: the second class of each."""
    return [each.get_attribute("class").split()[1] for each in all_of(page, selector)]


def test_the_verdict_is_first_and_clicks_open_rounds_and_outputs(page: Any) -> None:
    """The verdict is red, the worst output open, and its tokens are colored by their source."""
    (broken,) = all_of(page, ".verdict.broken strong")
    assert broken.text == "NOT LOSSLESS"
    red, green, blue = json.loads("[" + broken.value_of_css_property("color").split("(")[1].split(")")[0] + "]")[:3]
    assert red > 150 > 60 > max(green, blue)
    assert texts(page, ".verdict.sampled strong") == ["exact rule, sampled"]
    assert texts(page, "#view h3") == ["model, temperature 0"]
    kinds = classes(page, ".output .t")
    assert kinds == ["accepted", "accepted", "bonus", "accepted", "recovered", "accepted", "bonus"]
    colors = {kind: all_of(page, f".t.{kind}")[0].value_of_css_property("background-color") for kind in set(kinds)}
    assert len(set(colors.values())) == 3
    words = texts(page, ".output .t")
    assert words[:3] == [HOSTILE, "▯", "→"] and words[4] == "<b>"
    assert texts(page, ".tokens .rejected-token") == ["·bad"], "drafted below the end of the second round's path"
    assert texts(page, ".diverges") == ["differs from plain decoding"] and texts(page, ".drawer") == []

    all_of(page, ".round")[1].click()
    assert texts(page, ".drawer-head strong") == ["Round 1:"]
    assert "1 accepted (expected 1.00) of 3 drafted nodes, depth 2" in texts(page, ".drawer-head p")[0]
    assert classes(page, ".tree .node") == ["root", "accepted", "rejected", "rejected", "recovered"]
    assert texts(page, ".tree .word") == ["\\x86\\x92", "⏎", "·bad", "·bad", "<b>"]
    shares = [text for text in texts(page, ".tree .small") if text[0] in "pq"]
    assert len(shares) == 8 and all(0 < float(text[2:]) < 1 for text in shares)
    next(each for each in all_of(page, ".drawer-head button") if each.text == "next →").click()
    assert texts(page, ".drawer-head strong") == ["Round 2:"] and classes(page, ".tree .node")[-1] == "bonus"

    rows = texts(page, "#prompts tbody tr")
    number = next(i for i, row in enumerate(rows) if "model" in row and "last" in row)
    all_of(page, "#prompts tbody tr button")[number].click()
    prompt, others = all_of(page, "#view > details > summary")
    prompt.click()
    assert texts(page, ".prompt") == [f"say last {HOSTILE}"]
    others.click()
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(page, 10).until(lambda page: len(all_of(page, "#view h3")) == 2)  # it says later that it is open
    assert texts(page, "#view h3") == ["model, temperature 0", "plain, temperature 0"]
