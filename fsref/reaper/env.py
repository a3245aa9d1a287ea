"""The env worker's side: mints ids, records keeps, and removes what never reaches a consumer."""

import re
from collections.abc import Iterable
from typing import Final

from fsref.errors import StoreError
from fsref.failpoints import ARMED, failpoint
from fsref.journal.file import now_ms
from fsref.ledger import records
from fsref.ledger.ids import IDS_RECORD_MAX, pack_seqs
from fsref.ledger.rights import EnvRights
from fsref.reaper.holder import Holder, probe
from fsref.refs import INCARNATION_PATTERN

VOID_TEXT_MAX: Final = 50_000
INCARNATION: Final = re.compile(INCARNATION_PATTERN, re.ASCII)


class EnvHolder(Holder):
    """One env worker process = one incarnation. Thread-safe; nothing here waits for the store except ``close``."""

    role = "env"

    def _open(self) -> None:
        super()._open()
        self._rights = EnvRights(self.inc, strict=self._section.strict)
        self._bytes = 0
        try:
            probe(self._store, self.inc)
        except StoreError:
            self._give_up()
            raise

    def prefixes(self) -> list[str]:
        """The folders of everything that this worker's place in the run has put: this incarnation's, and those before it."""
        found = {path.stem for path in self._ledger.here.glob(f"env.{self._label}.*.jnl")}
        return sorted(f"obj/{inc}" for inc in found | {self.inc} if INCARNATION.fullmatch(inc))

    def next_seq(self) -> int:
        """Mints the next sequence number of this incarnation."""
        with self._lock:
            return self._rights.mint()

    def next_id(self) -> str:
        """Mints the next object id, ``inc/seq``: the same as ``next_seq``, but never torn by a concurrent ``rotate``."""
        with self._lock:
            return f"{self.inc}/{self._rights.mint()}"

    def keep(
        self, seq: int, *, byte_count: int, checksum: int, token_count: int, fields: int, etag: str = "", version_id: str = ""
    ) -> None:
        """Records that the object ``seq`` is published under its final name; call after the publish, before the reply.

        ``checksum`` is over the whole object, ``fields`` a bit mask over the schema's order. Raises ``NotHolder`` for a number that
        was not minted or is kept, ``JournalPoisoned``: the caller must then fail the episode and stop keeping.
        """
        self._deleter.check()
        record = records.Keep(now_ms(), seq, byte_count, checksum, token_count, fields, etag, version_id).check()
        with self._lock:
            self._rights.keep(seq, byte_count=byte_count)
            self._bytes += byte_count
            if ARMED:
                failpoint("keep.before_append")
            self._journal.append(record)
            if ARMED:
                failpoint("keep.after_append")

    def sent(self, request_id: str, object_ids: Iterable[str]) -> None:
        """Call right before the reply with these ids is handed to the transport. In memory only.

        From here on only ``nack`` may remove them. Raises ``NotHolder`` for ids that are not kept here or were sent before.
        """
        with self._lock:
            if ARMED:
                failpoint("sent.before")
            self._rights.sent(request_id, object_ids)
            if ARMED:
                failpoint("sent.after")

    def delivered(self, request_id: str) -> None:
        """The client acknowledged the reply: forget its ids. Optional; unacknowledged ones are bounded and settled by adoption."""
        with self._lock:
            self._rights.delivered(request_id)

    def nack(self, request_id: str) -> int:
        """The client cancelled and will never surface the reply: drops its ids as ``abandoned``. Returns how many (0: unknown here)."""
        with self._lock:
            self._deleter.check()
            ids = self._rights.nack(request_id)
            self._drop(ids, "abandoned")
            return len(ids)

    def discard(self, object_ids: Iterable[str], reason: str = "never_sent") -> int:
        """Drops kept ids whose reply was never handed to the transport; reason ``never_sent`` or ``encode_error``. Returns how many.

        Raises ``NotHolder`` for anything else (nothing is dropped then), ``DoubleDrop`` for a repeated call in strict mode.
        """
        self._check_reason(reason, records.ENV_REASONS)
        with self._lock:
            self._deleter.check()
            ids = self._rights.discard(object_ids)
            self._drop(ids, reason)
            return len(ids)

    def rotate(self, *, deadline_s: float = 10.0) -> str:
        """A new consumer session begins: discards what was not sent, closes, opens a new incarnation and returns it.

        Call it only while no put is in flight: a put that straddles it would publish under the closed incarnation.
        """
        with self._lock:
            self.close(deadline_s=deadline_s)
            self._open()
            return self.inc

    def close(self, *, deadline_s: float = 10.0) -> int:
        """Drops what was never sent, removes up to the deadline, writes ``close``. Returns how many removals are still pending."""
        with self._lock:
            if self._closed:
                return 0
            self._closed = True
            if not self._journal.poisoned and not self._fenced():
                self._drop(self._rights.discard([f"{self.inc}/{seq}" for seq in list(self._rights.unsent)]), "never_sent")
            holes = self._rights.void()
            void = pack_seqs(holes)
            fits = len(void) <= VOID_TEXT_MAX and len(holes) <= IDS_RECORD_MAX
            return self._finish(
                deadline_s=deadline_s, n=self._rights.minted if fits else None, void=void if fits else "", counters=self.counters
            )

    @property
    def counters(self) -> dict[str, int]:
        """Gauges and counts since this incarnation opened."""
        rights = self._rights
        return {
            "kept": len(rights.kept),
            "kept_bytes": self._bytes,
            "dropped": len(rights.dropped),
            "done": self._deleter.done,
            "pending_delete": self._deleter.pending,
            "retried": self._deleter.retried,
            "unclaimed": rights.unclaimed,
            "suppressed": rights.suppressed,
            "nack_unknown": rights.nack_unknown,
            "evicted": rights.evicted,
        }
