"""The env server: verifiers' own, which keeps arrays in the run's store and sends references.

``main`` is the role; ``install`` the way into verifiers' processes; ``worker`` and ``broker`` what runs there; ``generate`` takes arrays
out of engine replies, ``capture`` holds them per trace, ``payloads`` cuts them to branches, ``keep`` puts them. docs/env-servers.md has
the map of failures. Imports no torch.
"""
