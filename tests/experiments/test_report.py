"""``compare format=html``: one file that asks nobody for anything, with all texts as text; and in a real browser, where
a reader clicks, filters, sorts and types."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from experiments.compare import compare
from experiments.reporting.report.page import findings, outputs_to_show, write_page
from experiments.reporting.run_plots import acceptance_plot
from experiments.results.records import read_records
from experiments.results.runs import load_run
from experiments.results.texts import TOKENS, read_token_texts
from tests.experiments.conftest import called
from tests.experiments.made_runs import run_of
from tests.experiments.results.outputs import output
from tests.experiments.showcase import HOSTILE, OUTPUT, write_run


class Page(HTMLParser):
    """Elements of a page, and its texts outside of style and script."""

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


def test_hostile_texts_stay_texts_and_an_outputs_data_are_its_rounds(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", device=HOSTILE, dtype_reason=HOSTILE, overrides=[HOSTILE])
    page = page_of(tmp_path, str(folder))
    assert page.text.count(HOSTILE) >= 3, "where facts are shown, as text"
    assert [tag for tag, _ in page.tags].count("script") == 2, "the data and the code"
    assert not [attributes for tag, attributes in page.tags if tag == "img"]
    assert "<" not in page.data
    data = json.loads(page.data)
    (shown,) = data["runs"]
    assert shown["prompts"][2] == shown["prompts"][2] | {"id": f"last {HOSTILE}", "turns": [f"say last {HOSTILE}"]}
    assert shown["texts"]["2"] == HOSTILE

    drafted = next(each for each in shown["outputs"] if each["method"] == "model")
    assert tuple(drafted["k"]) == OUTPUT
    assert [data["sources"][number] for number in drafted["s"]] == [
        "accepted", "accepted", "bonus", "accepted", "recovered", "accepted", "bonus",
    ]  # fmt: skip
    assert drafted["x"] == {"1": "▯", "2": "→"}, "a character over two tokens"
    drawn = drafted["rounds"][1]
    assert (drawn["up"], drawn["path"], drawn["next"][0]) == ([-1, 0, 0, 1], [1], 7)
    assert 0 < drawn["p"][1] < 1


def test_nothing_is_asked_of_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line, with all texts and pictures."""
    monkeypatch.undo()
    run = load_run(write_run(tmp_path / "run"))
    acceptance_plot(run, run.folder / "acceptance_by_position.png", "")
    words = [str(run.folder), "format=html", f"out={tmp_path}", f"hydra.run.dir={tmp_path / 'hydra'}"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    compare.main()
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    (policy,) = (str(a["content"]) for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert (rules["default-src"], rules["img-src"]) == ("'none'", "data:")
    assert {name for name in rules if name.endswith("-src")} == {"default-src", "img-src", "style-src", "script-src"}
    assert [a["alt"] for tag, a in page.tags if tag == "img"] == ["acceptance by position"]
    for tag, attributes in page.tags:
        for name in ("src", "href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), f"<{tag} {name}={value}>"


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


def test_every_verdict_has_its_kind() -> None:
    differs = {"equals_plain": False, "divergence": 1, "margin": 0.5, "tie_bound": 1e-5}
    for kind, more in (
        ("broken", differs),
        ("ties", differs | {"margin": 1e-7}),
        ("equal", {"equals_plain": True}),
        ("lossy", differs | {"exactness": "lossy"}),
        ("unknown", {}),
        ("sampled", {"temperature": 1.0}),
    ):
        (found,) = findings([run_of([output("a", "plain"), output("a", "model", **more)])])
        assert found.kind == kind, more


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


# ---------------------------------------------------------------- in a browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--window-size=1400,1000",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if BROWSER is None or DRIVER is None:
        pytest.skip("needs a browser and its driver: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install '.[dev]'")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on a greedy run with a trace, and a sampled one without."""
    folder = tmp_path_factory.mktemp("report")
    runs = [load_run(write_run(folder / "greedy", temperature=0.0)), load_run(write_run(folder / "drawn", trace=False))]
    outputs, notes = outputs_to_show(runs, 100)
    write_page(runs, outputs, [read_token_texts(run.folder) for run in runs], folder / "report.html", notes=notes)
    return folder / "report.html"


@pytest.fixture
def page(browser: Any, path: Path) -> Iterator[Any]:
    """The page, freshly opened; at the end no error was logged, and nothing but the file was asked for."""
    browser.get_log("performance")  # forget what was before
    browser.get(path.as_uri())
    title = browser.title
    yield browser
    assert browser.title == title, "a text of the run was executed"
    assert browser.get_log("browser") == []
    asked = [
        message["params"]["request"]["url"]
        for entry in browser.get_log("performance")
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


def test_the_verdict_is_first_and_the_worst_output_open(page: Any) -> None:
    """Red, and tokens colored by their source; a prompt and the other outputs open with a click."""
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
    assert texts(page, ".diverges") == ["differs from plain decoding"]

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


def test_a_click_on_a_round_draws_its_tree(page: Any) -> None:
    assert texts(page, ".drawer") == []
    all_of(page, ".round")[1].click()
    assert texts(page, ".drawer-head strong") == ["Round 1:"]
    assert "1 accepted (expected 1.00) of 3 drafted nodes, depth 2" in texts(page, ".drawer-head p")[0]
    assert classes(page, ".tree .node") == ["root", "accepted", "rejected", "rejected", "recovered"]
    assert texts(page, ".tree .word") == ["\\x86\\x92", "⏎", "·bad", "·bad", "<b>"]
    shares = [text for text in texts(page, ".tree .small") if text[0] in "pq"]
    assert len(shares) == 8 and all(0 < float(text[2:]) < 1 for text in shares)
    next(each for each in all_of(page, ".drawer-head button") if each.text == "next →").click()
    assert texts(page, ".drawer-head strong") == ["Round 2:"] and classes(page, ".tree .node")[-1] == "bonus"
