"""The report in a real browser: a reader clicks, filters, sorts and types, and the page asks nobody for anything."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.reporting.report.page import outputs_to_show, write_page
from experiments.results.runs import load_run
from experiments.results.texts import read_token_texts
from tests.experiments.showcase import HOSTILE, write_run

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install '.[dev]'")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium"),
    pytest.mark.skipif(DRIVER is None, reason="needs the browser's driver: apt-get install chromium-driver"),
]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--window-size=1400,1000",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
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


def test_the_verdict_is_first_and_the_worst_output_open(page: Any) -> None:
    """Red, and tokens colored by their source."""
    (broken,) = all_of(page, ".verdict.broken strong")
    assert broken.text == "NOT LOSSLESS"
    red, green, blue = json.loads("[" + broken.value_of_css_property("color").split("(")[1].split(")")[0] + "]")[:3]
    assert red > 150 > 60 > max(green, blue)
    assert texts(page, ".verdict.sampled strong") == ["exact rule, sampled"]
    assert texts(page, "#view h3") == ["model, temperature 0"]
    kinds = [each.get_attribute("class").split()[1] for each in all_of(page, ".output .t")]
    assert kinds == ["accepted", "accepted", "bonus", "accepted", "recovered", "accepted", "bonus"]
    colors = {kind: all_of(page, f".t.{kind}")[0].value_of_css_property("background-color") for kind in set(kinds)}
    assert len(set(colors.values())) == 3
    words = texts(page, ".output .t")
    assert words[:3] == [HOSTILE, "▯", "→"] and words[4] == "<b>"
    assert texts(page, ".tokens .rejected-token") == ["·bad"], "drafted below the end of the second round's path"
    assert texts(page, ".diverges") == ["differs from plain decoding"]


def test_a_click_on_a_round_draws_its_tree(page: Any) -> None:
    assert texts(page, ".drawer") == []
    all_of(page, ".round")[1].click()
    assert texts(page, ".drawer-head strong") == ["Round 1:"]
    assert "1 accepted (expected 1.00) of 3 drafted nodes, depth 2" in texts(page, ".drawer-head p")[0]
    kinds = [each.get_attribute("class").split()[1] for each in all_of(page, ".tree .node")]
    assert kinds == ["root", "accepted", "rejected", "rejected", "recovered"]
    assert texts(page, ".tree .word") == ["\\x86\\x92", "⏎", "·bad", "·bad", "<b>"]
    shares = [text for text in texts(page, ".tree .small") if text[0] in "pq"]
    assert len(shares) == 8
    assert all(0 < float(text[2:]) < 1 for text in shares)
    next(each for each in all_of(page, ".drawer-head button") if each.text == "next →").click()
    assert texts(page, ".drawer-head strong") == ["Round 2:"]
    assert [each.get_attribute("class").split()[1] for each in all_of(page, ".tree .node")][-1] == "bonus"


def test_a_prompt_and_the_other_outputs_open(page: Any) -> None:
    rows = texts(page, "#prompts tbody tr")
    number = next(i for i, row in enumerate(rows) if "model" in row and "last" in row)
    all_of(page, "#prompts tbody tr button")[number].click()
    prompt, others = all_of(page, "#view > details > summary")
    prompt.click()
    assert texts(page, ".prompt") == [f"say last {HOSTILE}"]
    others.click()
    WebDriverWait(page, 10).until(lambda page: len(all_of(page, "#view h3")) == 2)  # it says later that it is open
    assert texts(page, "#view h3") == ["model, temperature 0", "plain, temperature 0"]
