"""The engines' forms need numpy alone."""

import subprocess
import sys


def test_importing_every_module_loads_no_torch_and_no_verifiers() -> None:
    code = (
        "import sys, fsref.wire.reply, fsref.wire.modelconfig, fsref.wire.routing, fsref.wire.masks, fsref.wire.logprobs\n"
        "print([m for m in ('torch', 'transformers', 'verifiers', 'renderers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_base64_works_without_pybase64() -> None:
    code = (
        "import sys; sys.modules['pybase64'] = None\n"
        "from fsref.wire.text import decode_base64, encode_base64\n"
        "assert decode_base64(encode_base64(b'abc'), what='x') == b'abc'\n"
        "assert decode_base64.__globals__['b64decode'].__module__ == 'base64'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
