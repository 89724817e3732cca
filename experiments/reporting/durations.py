"""How long something takes, in words."""


def duration(seconds: float) -> str:
    """A time in words: ``45 s``, ``3:07 min``, ``2:05 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
