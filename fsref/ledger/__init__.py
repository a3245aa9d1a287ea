"""The ledger as a pure state machine: records, id sets, rights, the fold of journals, and what the audit concludes. No I/O, no clocks."""
