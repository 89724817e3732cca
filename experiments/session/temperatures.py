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
    with style.styled():
        figure = style.new_figure(style.PAGE, 2.6)
        panels = figure.subplots(1, 2)
        for index, name in enumerate(dict.fromkeys(row["method"] for row in shown)):
            for panel, field in zip(panels, ("mean_acceptance_length", "speedup"), strict=True):
                own = [row for row in shown if row["method"] == name and row[field] is not None]
                values = [row[field] for row in own]
                panel.plot([row["temperature"] for row in own], values, label=name, **style.looks(index))
        for panel, label in zip(panels, ("mean acceptance length", "speedup over plain decoding"), strict=True):
            panel.set(xlabel="temperature", ylabel=label)
            panel.grid(visible=False)
        panels[0].legend()
        return [table], [style.save(figure, ended.run.folder / PICTURE)]
