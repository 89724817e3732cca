"""Audits of public functions, with repositories that the tests write."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

EXACT = """
def evaluate_posterior(logits, candidates, processors):
    row = depth = 0
    while True:
        law = softmax(processors(None, logits[row, depth][None])[0], 0)
        drawn = torch.multinomial(law, 1)
        below = torch.zeros(len(candidates), dtype=torch.bool)
        if depth + 1 < candidates.shape[1]:
            below = (candidates[:, : depth + 1] == candidates[row, : depth + 1]).all(1)
            below &= candidates[:, depth + 1] == drawn
        if not below.any():
            return row, depth, F.one_hot(drawn[0], len(law)).float()
        row, depth = int(below.int().argmax()), depth + 1
"""
"""Goes down while a draw from p is a child, and then emits that draw."""
REDRAWN = EXACT.replace("F.one_hot(drawn[0], len(law)).float()", "law")
COLD = EXACT.replace("processors(None, logits[row, depth][None])[0]", "logits[row, depth]")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return __import__("audit_public")


def repository(folder: Path, source: str) -> Path:
    """Write a repository that accepts as EAGLE's function is called."""
    file = folder / "eagle/model/utils.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"import no_such_module\n{source}")
    return folder


@pytest.mark.parametrize("source", [EXACT, REDRAWN, COLD])
def test_an_exact_function_passes_and_mistaken_ones_do_not(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
) -> None:
    exact = source == EXACT
    monkeypatch.setattr(sys, "argv", ["audit_public.py", "eagle", str(repository(tmp_path, source)), "--draws=800"])
    with pytest.raises(SystemExit) as ended:
        example.main()
    said = capsys.readouterr().out.splitlines()[-1]
    assert (ended.value.code, said) == (not exact, "follows the target" if exact else "DOES NOT FOLLOW THE TARGET")
    found = example.audit(example.SUBJECTS[1], example.Clone(tmp_path), 800)
    assert found.tv < 1e-6 if exact else found.tv > found.noise
    # Both ways agree: the outputs that were drawn, and the law.
    assert abs(found.sampled - found.tv) < 2 * found.noise
    assert (found.pvalue > example.LEVEL) == exact
