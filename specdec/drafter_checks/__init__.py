"""Is a drafter what it says? Tries it against the contract and lists what was found.

::

    from specdec.drafter_checks import assert_conforms, check_drafter

    for finding in check_drafter(MyDrafter, target):
        print(finding)
    assert_conforms(MyDrafter, target)  # in a test
"""

from specdec.drafter_checks.check import assert_conforms, check_drafter
from specdec.drafter_checks.findings import Finding, Status

__all__ = ["Finding", "Status", "assert_conforms", "check_drafter"]
