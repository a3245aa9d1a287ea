"""Whatever obstore, botocore and an S3 server say, as the one of ``fsref.errors`` that tells a caller what to do.

Only a status and an error code are taken from a reply: bodies, headers and URLs may hold key ids, signatures and tokens.
"""

import re
from typing import Final

from fsref.errors import (
    BadRef,
    ConfigError,
    FsrefError,
    ObjectCorrupt,
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

_LATER: Final = {
    "SlowDown", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests",
    "RequestTimeout", "RequestTimeoutException", "OperationAborted", "ConditionalRequestConflict", "503", "500",
    "IDPCommunicationError", "XMinioServerNotInitialized", "XAmzContentSHA256Mismatch", "BadDigest", "IncompleteBody",
}  # fmt: skip
"""Codes after which the same request may work; the last three say that a body was damaged on its way."""
_FULL: Final = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "EntityQuotaExceeded"}
_NO_BUCKET: Final = {"NoSuchBucket", "InvalidBucketName", "AllAccessDisabled"}
_EXPIRED: Final = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_DENIED: Final = {
    "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity", "AccountProblem", "NotSignedUp",
    "Unauthorized", "Forbidden", "MethodNotAllowed", "403", "401", "AuthorizationHeaderMalformed", *_EXPIRED,
    "InvalidIdentityToken", "IDPRejectedClaim", "InvalidClientTokenId",
}  # fmt: skip
"""The last line is what the token service says, which gives the keys of a role."""
_REGION: Final = {"PermanentRedirect", "TemporaryRedirect", "IllegalLocationConstraintException", "301", "307"}

BY_CLASS: Final[dict[str, type[FsrefError]]] = {
    "FileNotFoundError": ObjectMissing,
    "NotFoundError": ObjectMissing,
    "AlreadyExistsError": ObjectExists,
    "PreconditionError": StoreError,
    "NotModifiedError": StoreError,
    "PermissionDeniedError": StoreDenied,
    "UnauthenticatedError": StoreDenied,
    "UnknownConfigurationKeyError": ConfigError,
    "InvalidPathError": BadRef,
    "NotSupportedError": StoreError,
    "JoinError": StoreUnavailable,
    "GenericError": StoreUnavailable,
    "BaseError": StoreUnavailable,
}
"""obstore's classes, where neither status nor code says more. A test fails on a class of obstore that is not here."""


def from_obstore(error: Exception, asked: str) -> FsrefError:
    """The error to raise for what obstore raised. Raise it outside the ``except`` block, so that no context drags the original along."""
    text = str(error)
    status = re.search(r"status code: (\d{3})", text)
    code = re.search(r"<Code>([A-Za-z0-9.]{1,64})</Code>", text)
    if status or code:
        known = of_reply(asked, status=int(status[1]) if status else 0, code=code[1] if code else "")
        if known is not None:
            return known
    found = BY_CLASS.get(type(error).__name__)
    cause = _cause(text)
    if found is None:
        timeout = isinstance(error, TimeoutError | ConnectionError)
        return (StoreUnavailable if timeout else StoreError)(f"{asked}: {type(error).__name__}, {cause}")
    if found is ObjectExists:
        return exists(asked)
    if found is ObjectMissing:
        return ObjectMissing(f"{asked}: it is not there")
    if found is StoreDenied:
        return StoreDenied(f"{asked}: refused; check the credentials and the bucket's policy")
    return found(f"{asked}: {cause}")


def of_reply(asked: str, *, status: int, code: str) -> FsrefError | None:
    """The error for a reply of an S3 server; None where the reply alone does not say (a 404 or 412 depends on the operation)."""
    said = ", ".join(s for s in (f"status {status}" if status else "", code) if s)
    for codes, kind, hint in _TABLE:
        if code in codes:
            return kind(f"{asked}: {said}{hint}")
    for statuses, kind, hint in _BY_STATUS:
        if status in statuses:
            return kind(f"{asked}: {said}{hint}")
    return StoreError(f"{asked}: {said}") if status >= 400 and status not in {404, 409, 412} else None


_BY_STATUS: Final[tuple[tuple[set[int], type[StoreError], str], ...]] = (
    ({416}, ObjectCorrupt, ": the object ends before: truncated"),
    ({507}, StoreFull, "; free space or raise the quota"),
    ({408, 425, 429, 500, 502, 503, 504}, StoreUnavailable, ""),
    ({401, 403}, StoreDenied, "; check the credentials and the bucket's policy"),
    ({301, 302, 307, 308}, StoreError, "; set store.region to the bucket's region and check store.endpoint"),
)
_TABLE: Final[tuple[tuple[set[str], type[StoreError], str], ...]] = (
    (_LATER, StoreUnavailable, ""),
    (_FULL, StoreFull, "; free space or raise the quota"),
    (_NO_BUCKET, StoreError, "; make the bucket, or correct run.root and store.endpoint"),
    (_EXPIRED, StoreDenied, "; the credentials expired: renew them"),
    ({"RequestTimeTooSkewed"}, StoreDenied, "; set this machine's clock"),
    (_REGION, StoreError, "; set store.region to the bucket's region and check store.endpoint"),
    (_DENIED, StoreDenied, "; check the credentials and the bucket's policy"),
)


def exists(asked: str) -> ObjectExists:
    """The refusal of an insert-only name."""
    return ObjectExists(f"{asked}: an object of that name is there already; names are never reused")


def from_botocore(error: Exception, asked: str) -> FsrefError:
    """The error to raise for what botocore raised: its ``ClientError`` carries the reply, the others never reached a server."""
    reply = getattr(error, "response", None)
    if isinstance(reply, dict):
        code = re.sub(r"[^A-Za-z0-9.]", "", str(reply.get("Error", {}).get("Code", "")))[:64]
        status = int(reply.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        known = of_reply(asked, status=status, code=code)
        if known is not None:
            return known
        return ObjectMissing(f"{asked}: it is not there") if status == 404 else StoreError(f"{asked}: status {status}, {code}")
    name = type(error).__name__
    if name in {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError", "CredentialRetrievalError"}:
        return no_credentials(asked)
    if name in {"SSLError", "InvalidProxiesConfigError", "ParamValidationError", "NoRegionError", "InvalidEndpointConfigurationError"}:
        return ConfigError(f"{asked}: {name}; check store.endpoint, store.ca_file, store.proxy and store.region")
    return StoreUnavailable(f"{asked}: no answer ({name})")


def no_credentials(asked: str) -> StoreDenied:
    """Nobody gave credentials."""
    return StoreDenied(
        f"{asked}: no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or store.profile, or give the instance a role"
    )


def _cause(text: str) -> str:
    """Why no reply came, in the words of the HTTP client, without URLs."""
    if "TimedOut" in text or "kind: Timeout" in text:
        return "no answer in time"
    found = re.findall(r'message: "([^"]{1,80})"', text)
    if found:
        return str(found[-1])
    inner = re.search(r"HTTP error: ([a-z ]{1,60})", text)
    return inner[1].strip() if inner else "no answer"
