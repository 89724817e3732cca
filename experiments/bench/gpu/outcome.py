"""The findings of a part of the GPU's benchmark: written to its file as it comes, and shown at the end."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from experiments.bench.gpu.expected import judged
from experiments.bench.timing import NOTHING, missed, show
from experiments.results.manifest import ROOT, device_name, git_state, versions
from experiments.results.origin import json_text, replace_text

PARTS = {1: "smoke", 2: "measure", 3: "tests", 4: "profile"}
"""The parts by number."""
_CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,driver_version"
_VERDICTS = {None: NOTHING, True: "met", False: "missed"}


class Outcome:
    """The results of one part. Every change is on the disk at once, so that a part which is killed loses nothing.

    On a CPU it is a rehearsal, with tiny sizes. The commit is that of a copy without its repository; None asks git.

    Attributes:
        figures: What is compared with ``EXPECTED``, by name.
        records: Everything that was measured, by section.
    """

    def __init__(self, out: Path, part: int, device: torch.device, *, commit: str | None = None):
        self.out, self.part, self.device, self.rehearsal = out, part, device, device.type == "cpu"
        self.figures: dict[str, float | None] = {}
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.left_out: list[dict[str, str]] = []
        self.ended = False
        self._began = time.perf_counter()
        triton = getattr(sys.modules.get("triton"), "__version__", None)  # which transformers imports
        self._facts = {
            "part": PARTS[part],
            "rehearsal": self.rehearsal,
            "began": datetime.now().astimezone().isoformat(timespec="seconds"),
            "git": git_state(ROOT) if commit is None else {"commit": commit},
            "versions": {**versions(), "triton": triton, "cuda": torch.version.cuda},
            "device": device_name(device),
            "clocks": clocks(device),
        }
        self.write()

    def add(self, section: str, **record: Any) -> None:
        """Add a record to a section."""
        self.records.setdefault(section, []).append(record)
        self.write()

    @contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """Note an error of the ``with`` block as something that was left out: the others are to be measured, too."""
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
            self.left_out.append({"what": what, "why": why})
            print(f"{what}: {why}", flush=True)
            self.write()

    @property
    def expected(self) -> list[dict[str, Any]]:
        """The bounds, beside what was found."""
        return judged(PARTS[self.part], self.figures, device_name(self.device), rehearsal=self.rehearsal)

    @property
    def red(self) -> bool:
        """Whether the part has not ended, or misses something without which the following parts are worth nothing."""
        return not self.ended or any(each["stops"] and each["met"] is False for each in self.expected)

    def write(self) -> None:
        """Write everything that there is."""
        found = {**self._facts, "ended": self.ended, "red": self.red, "seconds": time.perf_counter() - self._began}
        found |= {"expected": self.expected, "left_out": self.left_out, **self.records}
        replace_text(file_of(self.out, self.part), json_text(found))

    def show(self) -> None:
        """Print what is expected beside what was found, and what was left out."""
        rows = [
            {
                "figure": each["what"],
                "wanted": each["wanted"],
                "found": NOTHING if each["found"] is None else f"{each['found']:.4g}",
                "": missed(_VERDICTS[each["met"]], wrong=each["met"] is False),
                "what that means": each["otherwise"] if each["met"] is False else "",
            }
            for each in self.expected
        ]
        ended = "" if self.ended else ", which did not come to its end"
        show(f"Part {self.part}, {PARTS[self.part]}{ended}: {device_name(self.device)}", rows)
        if self.left_out:
            show("Left out", self.left_out)
        print(f"wrote {file_of(self.out, self.part)}")

    def table(self, title: str, section: str) -> None:
        """Print the records of a section: texts and numbers, seconds in milliseconds."""
        records = self.records.get(section, [])
        cells = [(name, value) for each in records for name, value in each.items()]
        names = list(dict.fromkeys(name for name, value in cells if not isinstance(value, dict | list)))
        headings = {name: name.replace("seconds", "ms").replace("_", " ") for name in names}

        def cell(name: str, value: Any) -> str:
            if isinstance(value, float):
                return f"{1000 * value if name.endswith('seconds') else value:.4g}"
            return NOTHING if value is None else str(value)

        show(title, [{headings[name]: cell(name, each.get(name)) for name in names} for each in records])


def file_of(out: Path, part: int) -> Path:
    """Return the file of a part's results."""
    return out / f"{part}-{PARTS[part]}.json"


def was_red(out: Path) -> bool:
    """Return whether the first part has run in this folder, and was red or did not come to its end."""
    file = file_of(out, 1)
    return file.is_file() and json.loads(file.read_text(encoding="utf-8"))["red"]


def clocks(device: torch.device) -> dict[str, str] | None:
    """Return clocks, power and temperature of a GPU as its driver tells them; None where it does not."""
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return dict(zip(_CLOCKS.split(","), map(str.strip, told.split(",")), strict=False))


def counts(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return how many stages were refused, and the lowest share of rounds that were replayed."""
    shares = [each["replayed"] for each in records if each["replayed"] is not None]
    return {"refused": sum(each["refused"] for each in records), "replayed": min(shares, default=None)}
