"""The orchestrator: dispatches episodes, decides what trains, packs it and hands it over.

Owns the taskset and the order of things: ``dispatcher`` runs groups of episodes over the replicas, ``samples``, ``advantages`` and
``filters`` decide what trains and why the rest does not, ``packing`` and ``batch`` lay it over data ranks, ``loop`` ships and publishes,
``weights`` tells inference about new ones. Refuses arrays: it holds references and token-level data only.
"""
