"""Running read plans: byte ranges fetched, checked and decoded straight into the caller's buffers."""

from fsref.reader.buffers import DenseOut, Out, RaggedOut, allocate, values_max
from fsref.reader.run import Reader, failure_kind
from fsref.reader.tasks import (
    GAP_BYTES_LOCAL,
    GAP_BYTES_REMOTE,
    REQUEST_BYTES_LOCAL,
    REQUEST_BYTES_REMOTE,
    ReadCounters,
    request_limits,
)

__all__ = [
    "DenseOut",
    "GAP_BYTES_LOCAL",
    "GAP_BYTES_REMOTE",
    "Out",
    "REQUEST_BYTES_LOCAL",
    "REQUEST_BYTES_REMOTE",
    "RaggedOut",
    "ReadCounters",
    "Reader",
    "allocate",
    "failure_kind",
    "request_limits",
    "values_max",
]
