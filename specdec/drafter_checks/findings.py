"""Findings of checks."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The end of a check."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_APPLICABLE = "not applicable"
    """The drafter promises nothing that could be checked here."""
    NOT_TRIED = "not tried"
    """An earlier check failed, so that this one would say nothing."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: What was checked.
        status: How it ended.
        detail: What was tried; what is wrong; or why the check does not apply.
    """

    check: str
    status: Status
    detail: str

    @property
    def failed(self) -> bool:
        """Whether the drafter breaks the contract here."""
        return self.status is Status.FAILED

    def __str__(self) -> str:
        return f"{self.check}: {self.status}: {self.detail}"


def passed(check: str, detail: str) -> Finding:
    """Returns a check that found nothing wrong."""
    return Finding(check, Status.PASSED, detail)


def failed(check: str, detail: str) -> Finding:
    """Returns a check that found a mistake."""
    return Finding(check, Status.FAILED, detail)


def not_applicable(check: str, why: str) -> Finding:
    """Returns a check that this drafter gives no reason for."""
    return Finding(check, Status.NOT_APPLICABLE, why)


def not_tried(check: str, why: str) -> Finding:
    """Returns a check that could not be made."""
    return Finding(check, Status.NOT_TRIED, why)
