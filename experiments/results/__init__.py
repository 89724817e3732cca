"""Records of runs, the figures computed from them, and what made them; ``results.load("outputs/**")`` reads all.

Reading needs neither torch nor the rest of this project; only ``manifest.py``, for runs that are being made, does.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    # Imported when asked for: a run itself needs no pandas frames, and should not wait for them.
    if name in ("Results", "load"):
        from experiments.results import runs

        return getattr(runs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
