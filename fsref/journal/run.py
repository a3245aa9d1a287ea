"""``run.json``: the identity of a run, created exclusively under its root.

Owns the file's form and its checks. Refuses to start a run whose folder belongs to another one.
"""

import contextlib
import os
import time
from typing import Final

import msgspec

from fsref.errors import ObjectExists, ObjectMissing, RunMismatch, StoreUnavailable
from fsref.refs import Schema, check_run
from fsref.store.base import Store

NAME: Final = "run.json"
FORMAT: Final = 1
BYTES_MAX: Final = 1 << 20
STAGING: Final = ".run.tmp"
"""Its name on a filesystem while it is written."""
WAIT_S: Final = 10.0
POLL_S: Final = 0.02


class RunInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What ``run.json`` holds."""

    format: int
    run: str
    run_uuid: str
    """32 hex digits, minted once; journals repeat it."""
    schema: Schema
    ms: int = 0
    """Wall clock at creation in milliseconds, for people only."""
    purge: str = ""
    """Who began to purge the run; from then on nobody opens it."""


def create_run(store: Store, run: str, schema: Schema, *, wait_s: float = WAIT_S) -> RunInfo:
    """Creates ``run.json``, or returns the one that is there if it is of the same run and schema. Of several processes that do so at once
    one creates it, and all return the same.

    ``wait_s``: how long another process may take to write the file; then it counts as killed in the middle of it. Raises ``RunMismatch`` if
    the folder belongs to another run or the run has another schema, ``BadRef`` for an illegal id, ``StoreError``.
    """
    info = RunInfo(format=FORMAT, run=check_run(run), run_uuid=os.urandom(16).hex(), schema=schema, ms=time.time_ns() // 1_000_000)
    found = _created(store, msgspec.json.encode(info), wait_s=wait_s)
    if found.run != run:
        raise RunMismatch(f"{store.url} holds the run {found.run!r}, {run!r} was asked for: use another root")
    if found.schema != schema:
        raise RunMismatch(
            f"run {run!r} at {store.url} was created with other fields or codec: give the new run its own id, or restore the config"
        )
    return found


def _created(store: Store, data: bytes, *, wait_s: float) -> RunInfo:
    """What is there once it was created by this process or another: read back, whoever it was.

    A name that is taken while no file is there means that another process is writing it: on a filesystem the file being written has a
    name of its own, which only one process can have. Past the wait that one is removed, once; if its writer lives, its rename fails.
    """
    end = time.monotonic() + wait_s
    removed = False
    while True:
        with contextlib.suppress(ObjectExists):
            store.put(NAME, [data])
        with contextlib.suppress(ObjectMissing):
            return _not_purged(store, _parsed(store, store.read(NAME, bytes_max=BYTES_MAX)))
        if time.monotonic() >= end:
            if removed:
                raise StoreUnavailable(f"{store.url}/{NAME} cannot be created: its name is taken and it is not there; try again")
            store.delete([STAGING])
            removed, end = True, time.monotonic() + wait_s
        time.sleep(POLL_S)


def read_run(store: Store) -> RunInfo:
    """``run.json``. Raises ``RunMismatch`` if there is none, it is of another format or the run is being purged, ``StoreError`` if it
    cannot be read.
    """
    return _not_purged(store, read_for_purge(store))


def _not_purged(store: Store, info: RunInfo) -> RunInfo:
    if info.purge:
        raise RunMismatch(
            f"{store.url} is being purged ({info.purge}): `fsref purge` finishes that; a new run needs it gone, or another id"
        )
    return info


def mark_purge(store: Store, info: RunInfo, *, by: str) -> None:
    """Says in ``run.json`` that the run is being purged; nobody opens it from then on."""
    store.replace(NAME, msgspec.json.encode(msgspec.structs.replace(info, purge=ascii(by)[1:-1][:500])))


def read_for_purge(store: Store) -> RunInfo:
    """``run.json``, also of a run whose purge has begun. Raises as ``read_run``."""
    try:
        data = store.read(NAME, bytes_max=BYTES_MAX)
    except ObjectMissing as e:
        raise RunMismatch(f"{store.url} holds no run: {NAME} is not there") from e
    return _parsed(store, data)


def _parsed(store: Store, data: bytes) -> RunInfo:
    try:
        info = msgspec.json.decode(data, type=RunInfo)
        check_run(info.run)
    except (msgspec.DecodeError, ValueError) as e:
        raise RunMismatch(f"{store.url}/{NAME} cannot be read: {e}") from e
    if info.format != FORMAT:
        raise RunMismatch(f"{store.url}/{NAME} has format {info.format}, this version reads {FORMAT}: use the version that wrote it")
    if len(info.run_uuid) != 32 or set(info.run_uuid) - set("0123456789abcdef"):
        raise RunMismatch(f"{store.url}/{NAME} has no run_uuid of 32 hex digits")
    return info
