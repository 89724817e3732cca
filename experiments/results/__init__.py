"""What a run leaves behind: records, the figures computed from them, and what made them.

``results.load("outputs/**")`` reads finished and interrupted runs as pandas frames. Reading needs neither torch nor the
rest of this project: only ``manifest.py``, which belongs to a run while it is made, asks for them.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    # Imported when asked for: a run itself needs no pandas frames, and should not wait for them.
    if name in ("Results", "load"):
        from experiments.results import runs

        return getattr(runs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
