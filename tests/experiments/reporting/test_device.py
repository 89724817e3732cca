"""Warnings about what methods made of the device."""

from experiments.reporting.device import not_recorded


def test_stages_that_failed_to_be_recorded_are_named_once() -> None:
    failed = {"refused": {"commit": ["RuntimeError: operation not permitted"]}, "by_design": {}}
    fine = {"refused": {}, "by_design": {"requests have logits processors": 9}}
    assert not_recorded({"plain": failed, "medusa": failed, "other": fine}) == [
        "plain, medusa: not recorded, so that it ran slower: commit (RuntimeError: operation not permitted)"
    ]
