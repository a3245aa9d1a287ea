"""The ``fsref`` command: what a user types, and how every failure reads.

Owns the names, options and help of all commands, the split of ``--section.key value`` options from the rest, and the mapping of errors
to one line and an exit code. ``commands`` declares them by subject, ``app`` puts them together. Refuses to do the work: each command's body
lives in a module beside them and is imported by name when the command runs.

That late import is on purpose and happens here alone: ``fsref --help``, completion and the launcher must not pay for numpy, torch,
verifiers or transformers, and a role must not pay for those of another. ``tests/cli`` holds it in a fresh interpreter.

Exit codes: 0 done; 1 an error, a failed check or the audit verdict VIOLATED; 2 a bad command line or config; 10 BALANCED; 20
UNPROVABLE; 130 stopped by Ctrl-C; 143 stopped by SIGTERM.
"""

from fsref.cli.app import app, main

__all__ = ["app", "main"]
