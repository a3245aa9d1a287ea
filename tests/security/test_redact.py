"""What logs and messages show."""

import logging
from io import StringIO

import pytest

from fsref.redact import HIDDEN, RedactingFilter, guard_logging, redact, visible

SECRET = "S3CR3T/value+of=a"
LEAKS = [
    f"GET https://bucket.s3.amazonaws.com/obj?X-Amz-Credential=AKIA&X-Amz-Signature={SECRET} failed",
    f"https://user:{SECRET}@host/path",
    f"headers: {{'Authorization': 'AWS4-HMAC-SHA256 Credential=AKIA/1, Signature={SECRET}'}}",
    f"Authorization: Bearer {SECRET}",
    f'"authorization": "Basic {SECRET}"',
    f"x-amz-security-token: {SECRET}",
    f"X-Amz-Security-Token={SECRET}&x=1",
    f"aws_secret_access_key = {SECRET}",
    f'{{"secret_key": "{SECRET}"}}',
    f"AWS_SESSION_TOKEN={SECRET}",
    f"http://127.0.0.1:9000/b/k?token={SECRET}",
    f"password={SECRET}",
]


@pytest.mark.parametrize("text", LEAKS)
def test_secrets_are_taken_out(text: str) -> None:
    assert SECRET not in redact(text)
    assert HIDDEN in redact(text)


@pytest.mark.parametrize(
    "text",
    ["obj/env.a.0123456789abcdef/0000000001.zip was removed", "https://host/path/file: status 503", "step 3: 4 tokens, secret plan", ""],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "\udcff", "\u202egpj.exe", "\x9b31m", "\0"])
def test_control_characters_become_visible(text: str) -> None:
    assert visible(text).isprintable()
    assert visible("obj/\u00e4 b.zip") == "obj/\u00e4 b.zip"


@pytest.mark.parametrize("text", LEAKS)
def test_the_filter_covers_message_arguments_and_traceback(text: str) -> None:
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RedactingFilter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("message %s", text)
    try:
        raise OSError(text)
    except OSError as e:
        logger.exception("failed", exc_info=e)
    logger.warning({"plain": text})
    assert SECRET not in stream.getvalue()
    assert stream.getvalue().count("\n") >= 4
    assert "Traceback" in stream.getvalue()


def test_a_format_string_that_does_not_fit_is_loggings_affair(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("x", 10, "f", 1, "%s %s", ("a",), None)
    assert RedactingFilter().filter(record) is True
    assert capsys.readouterr().err == ""


def test_the_guard_is_put_on_once() -> None:
    handler = logging.StreamHandler(StringIO())
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        guard_logging()
        guard_logging()
        assert [type(f) for f in handler.filters] == [RedactingFilter]
    finally:
        root.removeHandler(handler)
