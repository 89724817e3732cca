"""A study as one function: what every method gains at every temperature. See ``conf/experiment/temperatures.yaml``."""

from experiments.reporting import style
from experiments.reporting.columns import LENGTH, METHOD, SPEEDUP, T
from experiments.reporting.table import Table
from experiments.session.measurement import Ended, Shown

TITLE = "What drafting brings by temperature"
PANELS = [
    style.Panel(x="temperature", y="mean_acceptance_length", labels=("temperature", "mean acceptance length")),
    style.Panel(x="temperature", y="speedup", labels=("temperature", "speedup over plain decoding"), at=1.0),
]


def temperatures(ended: Ended, *, picture: bool = True) -> Shown:
    """A row per method and temperature, and both figures over the temperatures as lines."""
    drafting = [row for row in ended.run.rows if row["exactness"] is not None and row["finished"]]
    rows = sorted(drafting, key=lambda row: (row["method"], row["temperature"]))
    table = Table.of(rows, [METHOD, T, LENGTH, SPEEDUP], title=TITLE, section=lambda row: row["method"])
    series = {name: [row for row in rows if row["method"] == name] for name in dict.fromkeys(r["method"] for r in rows)}
    path = ended.run.folder / "temperatures.png"
    return [table], [style.lines(path, PANELS, series, about=TITLE, subtitle="")] if picture else []
