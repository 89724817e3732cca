"""A study as one function: what every method gains at every temperature. See ``conf/experiment/temperatures.yaml``."""

from experiments.reporting import style
from experiments.reporting.cells import length, speedup
from experiments.reporting.table import Column, Table
from experiments.session.measurement import Ended, Shown

PICTURE = "temperatures.png"


def temperatures(ended: Ended, *, picture: bool = True) -> Shown:
    """A row per method and temperature, and both figures over the temperatures as lines."""
    methods = [each for each in ended.summary.methods if each.exactness is not None and each.finished]
    shown = sorted(methods, key=lambda each: (each.method, each.temperature))
    columns = [
        (Column("method", "left"), lambda each: each.method),
        (Column("T"), lambda each: f"{each.temperature:g}"),
        (Column("mean acceptance\nlength"), length),
        (Column("speedup"), speedup),
    ]
    table = Table.of(shown, columns, title="What drafting brings by temperature", section=lambda each: each.method)
    if not picture:
        return [table], []
    with style.styled():
        figure = style.new_figure(style.PAGE, 2.6)
        panels = figure.subplots(1, 2)
        for index, name in enumerate(dict.fromkeys(each.method for each in shown)):
            for panel, field in zip(panels, ("mean_acceptance_length", "speedup"), strict=True):
                own = [each for each in shown if each.method == name and getattr(each, field) is not None]
                values = [getattr(each, field) for each in own]
                panel.plot([each.temperature for each in own], values, label=name, **style.looks(index))
        for panel, label in zip(panels, ("mean acceptance length", "speedup over plain decoding"), strict=True):
            panel.set(xlabel="temperature", ylabel=label)
            panel.grid(visible=False)
        panels[0].legend()
        return [table], [style.save(figure, ended.folder / PICTURE)]
