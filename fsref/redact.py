"""What messages, logs and reports may show of text that came from elsewhere.

Owns taking secrets out (``redact``, and ``RedactingFilter`` for the logging of a process) and making control characters visible
(``visible``), so that neither a credential nor a terminal's escape code of a hostile file name gets
out. Refuses to judge where text is from.
"""

import logging
import re
from typing import Final

HIDDEN: Final = "[hidden]"
_PATTERNS: Final = (
    # query strings of URLs: signatures and tokens are among their values
    (re.compile(r"([a-z][a-z0-9+.-]{0,20}://[^\s?#'\"<>]{1,2048}\?)[^\s'\"<>]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    # user info of URLs, also where a password has a slash that should have been escaped
    (
        re.compile(r"([a-z][a-z0-9+.-]{0,20}://)(?:[^\s/@:'\"<>]{1,256}:[^\s@'\"<>]{1,512}|[^\s/@?#'\"<>]{1,512})@", re.IGNORECASE),
        rf"\1{HIDDEN}@",
    ),
    # signing parameters and headers, in any of the forms that clients print: X-Amz-Signature=..., "x-amz-security-token": "..."
    (
        re.compile(r"(\bX-Amz-[A-Za-z0-9-]{1,64}['\"]?\s*[=:,]\s*)(?:b?\"[^\"]*\"|b?'[^']*'|[^\s&,;'\"<>)}\]]+)", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(r"(\b(?:Proxy-)?Authorization['\"]?\s*[=:,]\s*)(?:b?\"[^\"]*\"|b?'[^']*'|[^\r\n'\"]+)", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(\b(?:Bearer|Basic|AWS4-HMAC-SHA256)\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\1{HIDDEN}"),
    (
        re.compile(
            r"(\b(?:aws_?)?(?:secret_?(?:access_?)?key|session_?token|security_?token|access_?key_?id|password|api_?key)['\"]?\s*[=:]\s*)"
            r"(?:b?\"[^\"]*\"|b?'[^']*'|[^\s&,;'\"<>)}\]]+)",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def redact(text: str) -> str:
    """``text`` without query strings, user info of URLs, ``X-Amz-*`` and ``Authorization`` values, and keys that are named as such."""
    for pattern, shown in _PATTERNS:
        text = pattern.sub(shown, text)
    return text


def visible(text: str) -> str:
    """``text`` with control characters, text-direction marks and undecodable bytes of file names as escapes."""
    return _CONTROL.sub(lambda m: m[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


class RedactingFilter(logging.Filter):
    """Redacts every record of the handler that it is attached to: message, arguments and traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._formatter = logging.Formatter()

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):  # a bad format string: logging itself reports that
            return True
        record.msg, record.args = redact(message), None
        if record.exc_info and not record.exc_text:
            record.exc_text = self._formatter.formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        if record.stack_info:
            record.stack_info = redact(record.stack_info)
        return True


def guard_logging() -> None:
    """Attaches the filter to every handler of the root logger; call it where a process sets up its logging. Idempotent."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(f, RedactingFilter) for f in handler.filters):
            handler.addFilter(RedactingFilter())
