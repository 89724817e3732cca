"""The command ``python -m experiments.bench NAME [name=value …]``: see the package."""

import importlib
import sys

import experiments.bench as package
from experiments.bench.options import did_you_mean, refuse


def main() -> None:
    """Run the benchmark that the first word names; the other words are its options."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        listed = "\n".join(f"  {name:<14} {about}" for name, about in package.NAMES.items())
        print(f"{(package.__doc__ or '').strip()}\n\nbenchmarks:\n{listed}")
        return
    name = words[0]
    if name not in package.NAMES:
        refuse(ValueError(f"there is no benchmark {name!r}{did_you_mean(name, package.NAMES)}"))
    sys.argv[1:] = words[1:]
    importlib.import_module(f"experiments.bench.{name}").main()


if __name__ == "__main__":
    main()
