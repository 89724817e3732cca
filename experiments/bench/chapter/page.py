"""The chapter "Why decoding is slow and what speculation buys", with all of its numbers and pictures.

Writes docs/why-decoding-is-slow.md from its template. Every number is computed by specdec.physics. The roof of "this
machine" is in experiments/bench/chapter/machine.yaml; ``measure=true`` measures yours into it first.
"""

import datetime
import os
import platform
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.options import option, read_options

ROOT = Path(__file__).parents[3]
TEMPLATE = ROOT / "docs/templates/why-decoding-is-slow.md.jinja"
PAGE = ROOT / "docs/why-decoding-is-slow.md"
WIDTH = 120
"""Characters per line."""
COMMAND = "Made by `python -m experiments.bench chapter"
NOTE = f"<!-- {COMMAND}`: edit docs/templates/why-decoding-is-slow.md.jinja instead. -->\n\n"


@dataclass(frozen=True)
class Options:
    """The command line."""

    measure: bool = option(False, "measure this machine first, which should be idle")
    page: Path = option(Path("docs/why-decoding-is-slow.md"), "the page")
    images: Path = option(Path("docs/images"), "folder of the pictures")


def rendered(template: str) -> str:
    """Return the page: the template with every value that it names.

    Args:
        template: Its text. Values are those of ``figures`` (``{{ f.load | s }}``), of ``given.yaml``
            (``{{ g.disk | gbps }}``), and tables of ``Tables``.

    Raises:
        jinja2.UndefinedError: It names something that does not exist.
    """
    from jinja2 import Environment, StrictUndefined  # a dependency of the documentation only

    from experiments.bench.chapter.figures import figures
    from experiments.bench.chapter.models import GIVEN
    from experiments.bench.chapter.tables import FILTERS, Tables

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    environment.filters.update(FILTERS)
    found = figures()
    return NOTE + reflowed(environment.from_string(template).render(f=found, g=GIVEN, tables=Tables(found)))


def reflowed(text: str) -> str:
    """Return Markdown whose paragraphs and list items are broken into lines of ``WIDTH`` again.

    Values are longer or shorter than their names. Blocks of code, tables and headings stay as they are.
    """
    lines: list[str] = []
    collected: list[str] = []
    fenced = False

    def flush() -> None:
        if collected:
            first = collected[0]
            indent = re.match(r"(?:\s*\* )?\s*", first)
            assert indent is not None
            words = " ".join(line.strip() for line in collected)
            before, after = indent[0], " " * len(indent[0])
            words = words.removeprefix(before.strip()).strip()
            lines.extend(
                textwrap.wrap(
                    words, WIDTH, initial_indent=before, subsequent_indent=after, break_long_words=False,
                    break_on_hyphens=False,
                )
            )  # fmt: skip
            collected.clear()

    for line in text.split("\n"):
        fence = line.startswith("```")
        if fenced or fence or not line.strip() or line.startswith(("|", "#", "!", "<")):
            flush()
            lines.append(line)
            fenced = fenced != fence
            continue
        if line.lstrip().startswith("* ") and not line.lstrip().startswith("**"):
            flush()
        collected.append(line)
    flush()
    return "\n".join(lines)


def chapter() -> str:
    """Return the chapter as it follows from today's code."""
    return rendered(TEMPLATE.read_text(encoding="utf-8"))


def main() -> None:
    """Write the page and its pictures."""
    options = read_options(Options, __doc__)
    if options.measure:
        from experiments.bench.chapter.models import MACHINE

        measure(MACHINE)
        print(f"measured: {MACHINE}")
    from experiments.bench.chapter.pictures import PICTURES

    options.page.write_text(chapter(), encoding="utf-8")
    print(f"written: {options.page}")
    for name, picture in PICTURES.items():
        path = options.images / f"{name}.png"
        picture.save(path)
        print(f"drawn: {path}")


def measure(path: Path) -> None:
    """Measure the processor and its memory, in about ten seconds, and write a row of the table of devices.

    Args:
        path: The file.
    """
    import torch
    import yaml

    from experiments.measuring.peaks import measure_peaks

    device = torch.device("cpu")
    first, second = (measure_peaks(device, torch.float32, seconds=1.5) for _ in range(2))
    best = first.better(second)
    threads = torch.get_num_threads()
    row = {
        "title": f"{_processor()}, {threads} {'core' if threads == 1 else 'cores'}",
        "memory": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "bandwidth": float(f"{best.roof.bandwidth:.3g}"),
        "cache": float(best.cache_bytes) or None,
        "flops": {"float32": float(f"{best.flops:.3g}")},
        "source": (
            f"measured on {datetime.date.today()} with PyTorch {torch.__version__} and {threads} threads: the faster "
            f"of a copy and a sum of memory, and a matrix product"
        ),
    }
    header = f"# {COMMAND} measure=true`: what one machine reaches.\n"
    path.write_text(header + yaml.safe_dump({"this-machine": row}, sort_keys=False, width=110), encoding="utf-8")


def _processor() -> str:
    """Return what the processor calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
