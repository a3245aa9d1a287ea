"""Inline transport, for measurements only: the same pipeline with the same repaired arrays carried in its messages.

``tasks`` patches env-server workers and the orchestrator, ``trainer`` a trainer rank; ``messages`` is what they carry. Nothing in
``fsref`` knows of it, there is no switch, and only ``tools.inline_run`` and tests start it.
"""
