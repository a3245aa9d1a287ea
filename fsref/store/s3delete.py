"""Removal from an S3-compatible bucket through botocore: in bulk, one by one, or by version, with an outcome for every name."""

from collections.abc import Sequence
from typing import Any

from fsref.errors import ObjectMissing, StoreError
from fsref.store.base import Deletion
from fsref.store.bulkdelete import BULK_MAX, remove_in_bulk
from fsref.store.retry import Retries
from fsref.store.s3client import S3Client
from fsref.store.s3errors import from_botocore

Outcomes = dict[str, Deletion | StoreError]


def remove_bulk(client: S3Client, retries: Retries, names: Sequence[str], *, url: str) -> Outcomes:
    """One DeleteObjects per 1,000 names, and further ones for what failed for a passing reason."""
    out: Outcomes = {}
    for at in range(0, len(names), BULK_MAX):
        targets = [{"Key": client.key(n)} for n in names[at : at + BULK_MAX]]
        results = _remove(client, retries, targets, url=url)
        out |= {client.name(t["Key"]): r for t, r in zip(targets, results, strict=True)}
    return out


def remove_each(client: S3Client, retries: Retries, names: Sequence[str], *, url: str) -> Outcomes:
    """One DELETE per name, for servers without DeleteObjects."""
    return {n: _remove_one(client, retries, n, asked=f"removing {url}/{n}") for n in names}


def remove_versions(client: S3Client, retries: Retries, names: Sequence[str], *, url: str) -> Outcomes:
    """Every version and delete marker of each name, by id: one listing per name, then bulk removal."""
    out: Outcomes = {}
    targets: list[dict[str, str]] = []
    for name in names:
        try:
            targets += _versions(client, retries, name, asked=f"listing the versions of {url}/{name}")
            out[name] = Deletion.DONE
        except StoreError as e:
            out[name] = e
    for at in range(0, len(targets), BULK_MAX):
        part = targets[at : at + BULK_MAX]
        for target, result in zip(part, _remove(client, retries, part, url=url), strict=True):
            if isinstance(result, StoreError):
                out[client.name(target["Key"])] = result
    return out


def _versions(client: S3Client, retries: Retries, name: str, *, asked: str) -> list[dict[str, str]]:
    key = client.key(name)
    found: list[dict[str, str]] = []
    marker: dict[str, str] = {}
    while True:
        reply = retries.run(
            lambda at=marker: _ask(client, asked, "list_object_versions", Bucket=client.bucket, Prefix=key, **at),  # type: ignore[misc]
            asked,
        )
        items = (*reply.get("Versions", ()), *reply.get("DeleteMarkers", ()))
        found += [{"Key": key, "VersionId": item["VersionId"]} for item in items if item["Key"] == key]
        if not reply.get("IsTruncated") or reply.get("NextKeyMarker", key) > key:
            return found
        marker = {"KeyMarker": reply["NextKeyMarker"], "VersionIdMarker": reply.get("NextVersionIdMarker", "")}


def _remove(client: S3Client, retries: Retries, targets: Sequence[dict[str, str]], *, url: str) -> list[Deletion | StoreError]:
    asked = f"removing {len(targets)} objects of {url}"

    def send(left: list[dict[str, str]]) -> Any:
        return _ask(client, asked, "delete_objects", Bucket=client.bucket, Delete={"Objects": left, "Quiet": False})

    return remove_in_bulk(send, retries, targets, asked=asked)


def _remove_one(client: S3Client, retries: Retries, name: str, *, asked: str) -> Deletion | StoreError:
    try:
        retries.run(lambda: _ask(client, asked, "delete_object", Bucket=client.bucket, Key=client.key(name)), asked)
    except ObjectMissing:
        return Deletion.ABSENT
    except StoreError as e:
        return e
    return Deletion.DONE


def _ask(client: S3Client, asked: str, operation: str, **arguments: Any) -> Any:
    with client.slot():
        try:
            return getattr(client.control, operation)(**arguments)
        except Exception as e:  # noqa: BLE001 - the seam
            error = from_botocore(e, asked)
    raise error
