"""A whole run in memory on the product's own state machine: rights, records, fold, adoption, succession and recovery plans.

Processes die between any two operations. Owns the scheduler, the disks that forget, the network that loses, and a reference model that
knows what really happened. Refuses threads, files and clocks: a seed names one history for ever.
"""
