"""This project's C for CPUs: what compiles it (``library``), and what is measured of it (``choices``)."""

from specdec.native.choices import chosen, loses, recommended_threads
from specdec.native.library import DTYPES, SWITCH, is_plain, native_library

__all__ = ["DTYPES", "SWITCH", "chosen", "is_plain", "loses", "native_library", "recommended_threads"]
