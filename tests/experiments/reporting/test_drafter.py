"""The table of ``check_drafter``."""

from experiments.reporting.drafter import drafter_table
from specdec.drafter_checks import Finding, Status


def test_the_note_states_the_odds_of_all_statistical_checks() -> None:
    """What is drawn and what is put out are tested at 1e-5 each."""
    note = "p-values below the limit are mistakes: at most 2 of 100,000 right drafters have one, by chance"
    counted = Finding("draws", Status.PASSED, "smallest p-value 0.3 of 4 tests")
    assert drafter_table("d", "t", [counted]).notes == [note]
    assert drafter_table("d", "t", [Finding("draws", Status.PASSED, "no draws")]).notes == []
