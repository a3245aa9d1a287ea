"""The object format: one ZIP with stored entries that holds a Zarr v3 group. Encoding, decoding of chunks, and a checked view of a file."""

from fsref.objects.codec import ChunkJob, Cut, Fetch, Fetched, can_fetch, check_chunk, decode_chunk, encode_chunk, fetch, unpack
from fsref.objects.encode import EncodedObject, encode
from fsref.objects.native import CRC_BYTES, Memory
from fsref.objects.view import EntryInfo, ObjectView, view

__all__ = [
    "CRC_BYTES",
    "ChunkJob",
    "Cut",
    "EncodedObject",
    "EntryInfo",
    "Fetch",
    "Fetched",
    "Memory",
    "ObjectView",
    "can_fetch",
    "check_chunk",
    "decode_chunk",
    "encode",
    "encode_chunk",
    "fetch",
    "unpack",
    "view",
]
