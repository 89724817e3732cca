"""The chapter "Why decoding is slow and what speculation buys", with all of its numbers and pictures.

Writes docs/why-decoding-is-slow.md from its template. Every number is computed by specdec.physics. The roof of "this
machine" is in experiments/bench/chapter/machine.yaml; ``measure=true`` measures yours into it first.
"""

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.options import option, read_options

ROOT = Path(__file__).parents[3]
TEMPLATE = ROOT / "docs/templates/why-decoding-is-slow.md.jinja"
PAGE = ROOT / "docs/why-decoding-is-slow.md"
COMMAND = "Made by `python -m experiments.bench chapter"
NOTE = f"<!-- {COMMAND}`: edit docs/templates/why-decoding-is-slow.md.jinja instead. -->\n\n"


@dataclass(frozen=True)
class Options:
    """The command line."""

    measure: bool = option(False, "measure this machine first, which should be idle")
    page: Path = option(Path("docs/why-decoding-is-slow.md"), "the page")
    images: Path = option(Path("docs/images"), "folder of the pictures")


def rendered(template: str | None = None) -> str:
    """Return the page: the template with every value that it names.

    Args:
        template: Its text; None for the chapter's. Values are those of ``figures`` (``{{ f.load | s }}``), of
            ``given.yaml`` (``{{ g.disk | gbps }}``), and tables of ``Tables``.

    Raises:
        jinja2.UndefinedError: It names something that does not exist.
    """
    from jinja2 import Environment, StrictUndefined

    from experiments.bench.chapter.figures import figures
    from experiments.bench.chapter.models import GIVEN
    from experiments.bench.chapter.tables import FILTERS, Tables

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    environment.filters.update(FILTERS)
    found = figures()
    text = TEMPLATE.read_text(encoding="utf-8") if template is None else template
    return NOTE + environment.from_string(text).render(f=found, g=GIVEN, tables=Tables(found))


def main() -> None:
    """Write the page and its pictures."""
    options = read_options(Options, __doc__)
    if options.measure:
        measure(Path(__file__).parent / "machine.yaml")
    from experiments.bench.chapter.pictures import PICTURES, save

    options.page.write_text(rendered(), encoding="utf-8")
    print(f"written: {options.page}")
    for name in PICTURES:
        path = options.images / f"{name}.png"
        save(name, path)
        print(f"drawn: {path}")


def measure(path: Path) -> None:
    """Measure the processor and its memory, in about ten seconds, and write a row of the table of devices."""
    import torch
    import yaml

    from experiments.measuring.peaks import measure_peaks
    from experiments.results.manifest import device_name

    device = torch.device("cpu")
    first, second = (measure_peaks(device, torch.float32, seconds=1.5) for _ in range(2))
    best, threads = first.better(second), torch.get_num_threads()
    row = {
        "title": f"{device_name(device)}, {threads} {'core' if threads == 1 else 'cores'}",
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
    print(f"measured: {path}")
