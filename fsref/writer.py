"""Puts payloads: encode, publish under a new name, record the receipt, return the reference.

Owns the order of these (ledger.md section 5: the object is durable under its final name before ``keep`` is written, and ``keep``
before the reference leaves). Refuses policy: what is kept, when, and who removes it is the roles' business.
"""

import contextlib
import itertools
import os
import threading
from typing import Final, Protocol

from fsref.errors import StoreUnavailable
from fsref.objects import EncodedObject, encode
from fsref.quota import Quota
from fsref.refs import BYTES_OBJECT_MAX, Lints, Payload, PayloadRef, Schema, Segment, check_incarnation, find, object_name
from fsref.refs.lints import counts
from fsref.store import Store
from fsref.store.base import Durability

_WARNING: Final = Lints.warning()


class Keeper(Protocol):
    """Who numbers objects and records receipts: the ledger's holder of an env-server worker, or ``Receipts`` where there is no ledger."""

    @property
    def inc(self) -> str:
        """The incarnation, ``role.label.boot``."""
        ...

    def next_seq(self) -> int:
        """A number that was never given out before; thread-safe."""
        ...

    def keep(self, seq: int, *, byte_count: int, checksum: int, token_count: int, fields: int) -> None:
        """Records that the object is published; bit n of ``fields``: it holds the schema's field n. Thread-safe."""
        ...


class Writer:
    """Writes payloads of one schema into one store. Thread-safe; ``put`` blocks and releases the GIL while it encodes and writes."""

    def __init__(
        self,
        store: Store,
        schema: Schema,
        keeper: Keeper,
        *,
        durability: Durability = "node",
        bytes_object_max: int = BYTES_OBJECT_MAX,
        quota: Quota | None = None,
        lints: Lints = _WARNING,
    ) -> None:
        """``quota``: this process's share of the run's limit on live bytes; None where there is no limit."""
        self._store, self._schema, self._keeper = store, schema, keeper
        self._durability: Durability = durability
        self._bytes_object_max = bytes_object_max
        self._quota, self._lints = quota, lints

    def put(self, payload: Payload, *, stop: threading.Event | None = None) -> PayloadRef:
        """Stores one branch's arrays as one object and returns its reference, which keeps all tokens.

        The writer's lints look at them first: what they count travels in the reference.

        Raises ``PayloadError`` if the arrays do not fit the schema, a lint that refuses, or the size limit, ``StoreError`` if they
        could not be published; in both cases no object is left (a number may be spent). Where a quota is used up it waits for room, at
        most ``quota_wait_s`` seconds; ``stop`` ends that with ``concurrent.futures.CancelledError``.
        """
        checked = payload.checked(self._schema)
        findings = find(checked, self._schema, self._lints)
        encoded = encode(checked, self._schema, bytes_max=self._bytes_object_max)
        room = self._quota.admitted(encoded.byte_count, stop=stop) if self._quota else contextlib.nullcontext()
        with room:
            seq = self._keeper.next_seq()
            object_id = f"{self._keeper.inc}/{seq}"
            self._publish(object_name(object_id), encoded)
            self._keeper.keep(
                seq,
                byte_count=encoded.byte_count,
                checksum=encoded.checksum,
                token_count=encoded.token_count,
                fields=sum(1 << n for n, f in enumerate(self._schema.fields) if f.name in encoded.fields),
            )
        return reference(object_id, encoded, self._schema, lints=counts(findings))

    def _publish(self, name: str, encoded: EncodedObject) -> None:
        try:
            self._store.put(name, encoded.buffers, durability=self._durability)
        except StoreUnavailable:
            # Its reply may have been lost: withdraw it, the name is ours alone. What cannot be withdrawn either is found as unjournaled.
            self._store.delete([name])
            raise


def reference(object_id: str, encoded: EncodedObject, schema: Schema, *, lints: tuple[int, ...] = ()) -> PayloadRef:
    """The reference to an encoded object, keeping all its tokens; ``lints`` as ``fsref.refs.lints.counts`` gives them."""
    tokens = encoded.token_count
    return PayloadRef(
        schema_hash=schema.hash,
        token_count=tokens,
        token_hash=encoded.token_hash,
        hashed_count=tokens,
        segments=(Segment(object_id, encoded.byte_count, 0, tokens, 0, encoded.index, encoded.missing),),
        stats=encoded.stats,
        lints=lints,
    )


class Receipts:
    """A keeper without a ledger, for a framework that removes objects by itself: numbers them, remembers nothing."""

    def __init__(self, label: str) -> None:
        self._inc = check_incarnation(f"env.{label}.{os.urandom(8).hex()}")
        self._seq = itertools.count()

    @property
    def inc(self) -> str:
        """A name that no other process has: ``env.<label>.<16 random hex digits>``."""
        return self._inc

    def next_seq(self) -> int:
        """0, 1, 2, ...; thread-safe."""
        return next(self._seq)

    def keep(self, seq: int, *, byte_count: int, checksum: int, token_count: int, fields: int) -> None:
        """Nothing to record."""
