"""The compiled kernels for tests: with a C compiler they must be there."""

from fsref.objects import native
from fsref.refs import Codec
from tests.support import needs

LZ4, NONE = Codec(), Codec(name="none")


def kernels() -> native.Kernels:
    """Skips where there is no compiler."""
    needs.program("cc")
    assert native.KERNELS is not None, native.ABOUT
    return native.KERNELS
