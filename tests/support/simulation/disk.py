"""Journals on disks that forget: what a power loss takes, what a lost node takes, what a full disk tears."""

from fsref.ledger.fold import JournalFold
from fsref.ledger.records import AnyRecord
from tests.support.journals import Book


class Disk(Book):
    """One journal. With ``segments`` the file itself dies with its node and only sealed spans are left in object storage."""

    def __init__(self, inc: str, *, node: str, boot: str, segments: bool, frozen: bool = False) -> None:
        self.node, self.boot, self.segments, self.frozen = node, boot, segments, frozen
        self.spans: list[tuple[int, int]] = []
        """Sealed ranges of offsets."""
        self.sealed = 0
        self.torn: AnyRecord | None = None
        """A record of which only a part was written: the file ends with garbage."""
        self.closed = False
        self._fold: JournalFold | None = None
        self._fed = 0
        super().__init__(inc, boot=boot)
        self.seal()

    @property
    def durable(self) -> int:
        """The offset before which nothing can get lost. Env workers seal at their close only; until then their disk counts."""
        return self.sealed if self.segments and not self.inc.startswith("env.") else self.synced

    def seal(self) -> None:
        """Everything so far goes to object storage as one segment."""
        if self.end > self.sealed:
            self.spans.append((self.sealed, self.end))
            self.sealed = self.end

    def skip_segment(self) -> None:
        """A segment whose upload failed and that nobody tried again."""
        self.sealed = self.end

    def tear(self, record: AnyRecord) -> None:
        """A short write: the record is not there, and nothing can follow it."""
        self.torn = record

    def lose(self, share: float) -> None:
        """The node is gone: of what was not durable at most the first ``share`` is left."""
        self.torn = None
        self.forget_fold()
        if not self.segments:
            self.lose_tail(share)
            return
        self.records = [r for r in self.records if any(lo <= r[0] < hi for lo, hi in self.spans)]
        self.end = self.synced = max(hi for _, hi in self.spans)

    def settle(self) -> None:
        """What an adopter does before it records how far it read: from here on this journal cannot get shorter."""
        self.sync()
        if self.segments:
            self.seal()

    def fold(self, *, torn: bool = False) -> JournalFold:
        """What the journal says; ``torn`` takes half a record for a whole one. The fold goes on growing with the journal, unless it is
        ``frozen``: where a process that was declared dead writes on, its adopter must not see what came after it had read."""
        if self._fold is None or self.frozen:
            self._fold, self._fed = JournalFold(self.inc), 0
        for at, record in self.records[self._fed :]:
            self._fold.feed(at, record)
        self._fed, fold = len(self.records), self._fold
        if torn and self.torn is not None and fold.close is None:
            fold.feed(self.end, self.torn)
            self.forget_fold()
        return fold

    def forget_fold(self) -> None:
        """The fold that was handed out was cut, or the journal lost records: the next one starts anew."""
        self._fold = None
