"""Who samples: a small server for a tiny model (``demo``), or a real vLLM with the same model folder (``external``).

Owns the process that answers ``POST /inference/v1/generate`` in vLLM's native wire form. The rest of the pipeline speaks HTTP to it
and never learns which one it is. ``python -m fsref inference --config ...`` runs ``main.main``.
"""
