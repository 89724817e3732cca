"""Everything that only a GPU can show: the tests marked ``gpu``, then the engine's benchmark, which gets the options.

It runs in the Python that it is started with, whose packages it leaves as they are: no environment is made.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDED = (
    "torch", "transformers", "numpy", "scipy", "jaxtyping", "psutil", "safetensors", "rich", "matplotlib", "yaml",
    "pytest", "hypothesis",
)  # fmt: skip
"""The modules that the tests and the benchmark import."""


def missing() -> list[str]:
    """Return the packages that are not installed, as one installs them."""
    lacking = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    return [{"yaml": "pyyaml"}.get(module, module) for module in lacking]


def gpu_tests(folder: Path = ROOT / "tests") -> list[str]:
    """Return the test files with tests that need a GPU.

    Only these are collected: others import what a machine for measurements need not have.
    """
    marked = re.compile(r"^\s*(?:@|pytestmark = \[?|.*marks=\[?)pytest\.mark\.gpu\b", re.MULTILINE)
    return sorted(str(path) for path in folder.rglob("test_*.py") if marked.search(path.read_text(encoding="utf-8")))


def main() -> None:
    """Check what is needed, run both, and fail if one of them did."""
    if any(word in ("-h", "--help", "help") for word in sys.argv[1:]):
        print((__doc__ or "").strip())
        return
    if lacking := missing():
        sys.exit(f"error: {' and '.join(lacking)} not installed in {sys.executable}: pip install {' '.join(lacking)}")
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"error: torch {torch.__version__} sees no GPU here: run it on a machine that has one")
    # A warning of some package in a version of its own is no failure of what is tested.
    tests = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default", *gpu_tests()]
    codes = []
    for words in (tests, ["-m", "experiments.bench", "engine", *sys.argv[1:]]):
        print("$", " ".join(words), flush=True)
        codes.append(subprocess.run([sys.executable, *words], cwd=ROOT).returncode)
    sys.exit(max(abs(code) for code in codes))
