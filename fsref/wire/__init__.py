"""Engines' reply forms to numpy, and back.

Owns every form in which an inference engine's HTTP reply carries per-token arrays: vLLM's native forms of 0.27 and 0.32, prime-rl's
packed forms, and SGLang's. Refuses anything else with ``WireError``: a form is read exactly or not at all. numpy and the standard
library only (``pybase64`` where it is installed); no torch, no verifiers, no I/O but ``modelconfig``, which reads one config.json.

Modules: ``npy`` (.npy bytes), ``text`` (base64), ``routing`` (routed experts), ``logprobs`` (sampled logprobs and top-k heads),
``masks`` (sampling masks), ``reply`` (a whole choice), ``sglang`` (SGLang's reply), ``forms`` (which form a reply has), ``modelconfig``
(layer ids and sizes from a model folder).
"""
