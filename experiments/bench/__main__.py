"""The command ``python -m experiments.bench NAME [name=value …]``: see the package."""

import importlib
import sys

from experiments.bench import NAMES
from experiments.bench.options import did_you_mean, refuse


def main() -> None:
    """Run the benchmark that the first word names; the other words are its options."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        import experiments.bench as package

        print(f"{(package.__doc__ or '').strip()}\n\nbenchmarks:")
        for name, about in NAMES.items():
            print(f"  {name:<14} {about}")
        return
    name = words[0]
    if name not in NAMES:
        refuse(ValueError(f"there is no benchmark {name!r}{did_you_mean(name, NAMES)}"))
    sys.argv[1:] = words[1:]
    importlib.import_module(f"experiments.bench.{name}").main()


if __name__ == "__main__":
    main()
