"""Launching the roles of a run: on this machine (``run``). Knows their command lines and exit codes, never what they do."""
