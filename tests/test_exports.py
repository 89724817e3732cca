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


def loaded_after(code: str, names: tuple[str, ...] = HEAVY) -> list[str]:
    """Which modules a fresh process has loaded after some code."""
    code += f"\nimport sys; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_importing_the_packages_imports_nothing_heavy() -> None:
    assert loaded_after(f"import {', '.join(PACKAGES)}; dir(specdec); specdec.__version__") == []


def test_a_name_brings_what_it_needs_and_no_more() -> None:
    assert "torch" in loaded_after("import specdec; specdec.Engine")
    models = ("transformers.modeling_utils", "specdec.engine.engine", "drafters.model")
    assert loaded_after("from specdec import DraftTree, SamplingParams, TreeShape, Verifier", models) == []
    assert loaded_after("from verifiers import RejectionVerifier", ("verifiers.transport", "scipy", *models)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        assert getattr(importlib.import_module(value.__module__), name) is value
        assert vars(module)[name] is value, "the second access asks nobody"


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_same_names(package: str) -> None:
    """A type checker reads the imports, Python reads the homes, and both agree with ``__all__``."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module for node in branch.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    (call,) = (node for node in ast.walk(branch) if isinstance(node, ast.Call))
    assert typed == ast.literal_eval(call.args[1])
    assert set(typed) == set(importlib.import_module(package).__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import specdec

    with pytest.raises(AttributeError, match="module 'specdec' has no attribute 'Enigne'"):
        specdec.Enigne  # noqa: B018
    assert not hasattr(specdec, "nothing")
    with pytest.raises(ImportError, match="cannot import name 'Enigne'"):
        exec("from specdec import Enigne")


def test_advice_knows_rules_that_are_not_imported_yet() -> None:
    """A rule is recommended from the package of the one that does not fit, although nobody has used it."""
    code = """
from drafters import NGramDrafter
from specdec import DraftSampling, Exactness, Verifier
from verifiers import TypicalVerifier  # lossy, so others come first

class Own(Verifier):
    exactness, laws, chain_only = Exactness.EXACT, frozenset(DraftSampling), True
    def stop_law(self, tree, target_probs): ...
    def next_law(self, tree, target_probs, stop): ...

try:
    Own().check(NGramDrafter())
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "use RejectionVerifier" in done.stdout
