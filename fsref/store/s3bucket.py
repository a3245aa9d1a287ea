"""Making a bucket, for servers that fsref starts itself; on others somebody else does, with the rules that fit there."""

from fsref.config import StoreSection
from fsref.store.credentials import Credentials
from fsref.store.retry import Retries
from fsref.store.s3client import S3Client
from fsref.store.s3errors import from_botocore


def make_bucket(bucket: str, *, settings: StoreSection, credentials: Credentials | None = None) -> bool:
    """Makes ``bucket`` if it is not there; whether it did. Raises ``StoreError``, ``ConfigError``."""
    asked = f"making the bucket {bucket!r}"
    client = S3Client(bucket, "", settings, credentials, asked=asked)

    def attempt() -> bool:
        try:
            found = [b["Name"] for b in client.control.list_buckets()["Buckets"]]
            if bucket not in found:
                client.control.create_bucket(Bucket=bucket)
        except Exception as e:  # noqa: BLE001 - the seam
            error = from_botocore(e, asked)
        else:
            return bucket not in found
        raise error

    return Retries(retries_max=settings.retries_max, retry_s=settings.retry_s).run(attempt, asked)
