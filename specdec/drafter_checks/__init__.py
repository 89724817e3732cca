"""Is a drafter what it says? Tries it against the contract and lists what was found.

::

    from specdec.drafter_checks import check_drafter

    for finding in check_drafter(MyDrafter, target):
        print(finding)
"""

from specdec.drafter_checks.check import check_drafter
from specdec.drafter_checks.findings import Finding, Status

__all__ = ["Finding", "Status", "check_drafter"]
