"""The command ``python -m experiments.bench chapter``: see the package."""

from experiments.bench.chapter import Options
from experiments.bench.chapter.page import chapter
from experiments.bench.options import read_options


def main() -> None:
    """Write the page and its pictures."""
    import experiments.bench.chapter as package

    options = read_options(Options, package.__doc__)
    if options.measure:
        from experiments.bench.chapter.measured import measure
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


if __name__ == "__main__":
    main()
