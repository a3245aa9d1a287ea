"""S3's DeleteObjects, read key by key.

A reply may say 200 and still have failed for some keys: each key's own result is read, and what failed for a passing reason is tried
again. S3 lists absent keys as deleted, so "done" means gone, not that it was there. A key that the reply does not mention is not done.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from fsref.errors import StoreError, StoreUnavailable
from fsref.store.base import Deletion
from fsref.store.retry import Retries
from fsref.store.s3errors import of_reply

BULK_MAX: Final = 1000
"""Keys of one DeleteObjects."""


def remove_in_bulk(
    send: Callable[[list[dict[str, str]]], Any], retries: Retries, targets: Sequence[dict[str, str]], *, asked: str
) -> list[Deletion | StoreError]:
    """The outcome of each key (and version), in order. ``send`` makes one DeleteObjects of some of them and returns the reply."""
    outcomes: dict[tuple[str, str], Deletion | StoreError] = {}

    def attempt() -> None:
        left = [t for t in targets if isinstance(outcomes.get(_id(t), StoreUnavailable()), StoreUnavailable)]
        outcomes.update(read_reply(send(left), left, asked=asked))
        later = [o for t in left if isinstance(o := outcomes[_id(t)], StoreUnavailable)]
        if later:
            raise StoreUnavailable(f"{len(later)} of {len(left)} failed, as {later[0]}")

    try:
        retries.run(attempt, asked)
    except StoreError as e:
        return [outcomes.get(_id(t), e) for t in targets]
    return [outcomes[_id(t)] for t in targets]


def read_reply(reply: Any, targets: Sequence[dict[str, str]], *, asked: str) -> dict[tuple[str, str], Deletion | StoreError]:
    """What a DeleteObjects reply says of each target; ``StoreUnavailable`` for one that it does not mention."""
    found: dict[tuple[str, str], Deletion | StoreError] = {_id(t): _deleted(t, asked) for t in reply.get("Deleted", ())}
    for error in reply.get("Errors", ()):
        code = str(error.get("Code", ""))
        found[_id(error)] = Deletion.ABSENT if code in {"NoSuchKey", "NoSuchVersion"} else _refusal(f"{asked}: {error.get('Key')}", code)
    return {_id(t): found.get(_id(t), StoreUnavailable(f"{asked}: the reply says nothing of {t['Key']}")) for t in targets}


def _deleted(result: Any, asked: str) -> Deletion | StoreError:
    """Done, unless the server says that it only hid the object behind a delete marker."""
    if result.get("DeleteMarker") and not result.get("VersionId"):
        return StoreError(f"{asked}: {result.get('Key')}: the bucket keeps versions, so the object's bytes stay; turn versioning off")
    return Deletion.DONE


def _refusal(asked: str, code: str) -> StoreError:
    error = of_reply(asked, status=0, code=code)
    return error if isinstance(error, StoreError) else StoreError(f"{asked}: {code or 'no reason given'}")


def _id(target: Any) -> tuple[str, str]:
    """Key and version; a reply that names no version answers for the key."""
    return str(target.get("Key", "")), str(target.get("VersionId", ""))
