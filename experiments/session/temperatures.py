"""A study as one function: what every method gains at every temperature. See ``conf/experiment/temperatures.yaml``."""

from experiments.reporting import style
from experiments.reporting.columns import LENGTH, METHOD, SPEEDUP, T
from experiments.reporting.table import Table
from experiments.session.measurement import Ended, Shown

PICTURE = "temperatures.png"


def temperatures(ended: Ended, *, picture: bool = True) -> Shown:
    """A row per method and temperature, and both figures over the temperatures as lines."""
    drafting = [row for row in ended.run.rows if row["exactness"] is not None and row["finished"]]
    shown = sorted(drafting, key=lambda row: (row["method"], row["temperature"]))
    title = "What drafting brings by temperature"
    table = Table.of(shown, [METHOD, T, LENGTH, SPEEDUP], title=title, section=lambda row: row["method"])
    if not picture:
        return [table], []
    series = {name: [row for row in shown if row["method"] == name] for name in {row["method"]: 0 for row in shown}}
    labels = {"mean_acceptance_length": "mean acceptance length", "speedup": "speedup over plain decoding"}
    panels = [style.Panel(x="temperature", y=field, labels=("temperature", text)) for field, text in labels.items()]
    return [table], [style.lines(ended.run.folder / PICTURE, panels, series, about=title, subtitle="")]
