"""The ledger as a pure state machine: records, id sets, rights, the fold of journals, and what the audit concludes. No I/O, no clocks.

``records`` and ``lines`` are the format, ``ids`` the sets of object ids, ``rights`` the legal moves of a live holder, ``fold`` what one
journal says, ``merge`` the union of all, ``predicates`` the invariants, ``report`` the verdict.
"""

from fsref.ledger.report import Audit, Verdict

__all__ = ["Audit", "Verdict"]
