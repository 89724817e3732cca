"""The command ``python -m benchmarks.chapter``: see the package."""

from benchmarks.chapter import Options
from benchmarks.chapter.page import chapter
from benchmarks.options import read_options


def main() -> None:
    """Write the page and its pictures."""
    import benchmarks.chapter as package

    options = read_options(Options, package.__doc__)
    if options.measure:
        from benchmarks.chapter.measured import measure
        from benchmarks.chapter.models import MACHINE

        measure(MACHINE)
        print(f"measured: {MACHINE}")
    from benchmarks.chapter.pictures import PICTURES

    options.page.write_text(chapter(), encoding="utf-8")
    print(f"written: {options.page}")
    for name, picture in PICTURES.items():
        path = options.images / f"{name}.png"
        picture.save(path)
        print(f"drawn: {path}")


if __name__ == "__main__":
    main()
