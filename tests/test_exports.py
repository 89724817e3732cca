"""Public names are imported when they are first used, and are the same objects as in their own modules."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("specdec", "drafters", "verifiers")
HEAVY = ("torch", "transformers", "numpy", "scipy", "jaxtyping", "safetensors", "tokenizers", "huggingface_hub")


def loaded_after(*codes: str) -> list[set[str]]:
    """Which modules one fresh process has loaded after each of some pieces of code."""
    whole = "import sys\n" + "".join(f"{code}\nprint(list(sys.modules))\n" for code in codes)
    done = subprocess.run([sys.executable, "-c", whole], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [set(ast.literal_eval(line)) for line in done.stdout.splitlines()]


@pytest.mark.full
def test_names_are_imported_when_they_are_used_and_bring_no_more_than_they_need() -> None:
    models = {"transformers.modeling_utils", "specdec.engine.engine", "drafters.model"}
    packages, contracts, rule, engine = loaded_after(
        f"import {', '.join(PACKAGES)}; dir(specdec); specdec.__version__",
        "from specdec import DraftTree, SamplingParams, TreeShape, Verifier",
        "from verifiers import TypicalVerifier",
        "specdec.Engine",
    )
    assert packages >= set(PACKAGES) and not packages & {*HEAVY, *models}
    assert "torch" in contracts and not contracts & models
    assert "verifiers.longest_path" in rule and not rule & {"verifiers.transport", "scipy", *models}
    assert "specdec.engine.engine" in engine and "verifiers.rejection" not in engine


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        assert getattr(importlib.import_module(value.__module__), name) is value
        assert vars(module)[name] is value, "the second access asks nobody"


def test_an_unknown_name_is_an_attribute_error() -> None:
    import specdec

    with pytest.raises(AttributeError, match="module 'specdec' has no attribute 'Enigne'"):
        specdec.Enigne  # noqa: B018
    assert not hasattr(specdec, "nothing")
    with pytest.raises(ImportError, match="cannot import name 'Enigne'"):
        exec("from specdec import Enigne")
