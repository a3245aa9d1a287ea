"""Sentinel credentials through a whole scenario: nothing that a run leaves or prints may show them (point 5)."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faultproxy import FaultProxy
from tests.support.s3servers import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

TOKEN = "SENTINELTOKENthatmustneverbeshown"
SCENARIO = """
import logging, sys, traceback
from pathlib import Path
from fsref.cli.failures import one_line, set_up_logging
from fsref.config import LedgerSection, StoreSection
from fsref.errors import FsrefError
from fsref.journal import create_run
from fsref.reaper import EnvHolder, audit, close_run, purge
from fsref.journal import read_for_purge
from fsref.refs import Schema, object_name, top_logprobs
from fsref.store import open_root
from fsref.store.filesystem import FilesystemStore

root, endpoint, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
set_up_logging(verbose=True)
log = logging.getLogger("fsref.scenario")
settings = StoreSection(endpoint=endpoint, region="us-east-1", retries_max=0, retry_s=0.5)


def show(what, store):
    log.error("%s failed on %r %s", what, store, vars(store) if hasattr(store, "__dict__") else "", exc_info=sys.exc_info())
    log.error("%s", one_line(sys.exc_info()[1]))
    print(repr(sys.exc_info()[1]), sys.exc_info()[1].args)
    traceback.print_exc()


with open_root(root, run="r1", settings=settings) as store:
    run = create_run(store, "r1", Schema((top_logprobs(),)))
    with EnvHolder(store, folder / "ledger", run=run, section=LedgerSection(batch_wait_s=0.01)) as env:
        for n in range(3):
            seq = env.next_seq()
            try:
                store.put(object_name(f"{env.inc}/{seq}"), [b"x" * 100])
            except FsrefError:
                show("put", store)
                continue
            env.keep(seq, byte_count=100, checksum=7, token_count=10, fields=1)
            env.discard([f"{env.inc}/{seq}"])
    for what, call in {
        "open": lambda: store.open("obj/nothing"),
        "read": lambda: store.read("run.json", bytes_max=10),
        "list": lambda: list(store.list("obj")),
        "list again": lambda: list(store.list("obj")),
    }.items():
        try:
            call()
        except FsrefError:
            show(what, store)
    print("\\n".join(audit(store, folder / "ledger", run="r1").render()))
    print(close_run(store, folder / "ledger", run=run).to_json())
for url in (root.replace("s3://", "s3://user:SENTINEL@") , "s3://no-such-bucket/x?X-Amz-Signature=SENTINEL"):
    try:
        with open_root(url, run="r1", settings=settings) as store:
            store.open("run.json")
    except FsrefError:
        show("a bad root", None)
print("done")
"""


@pytest.mark.fault(53)
def test_no_log_journal_report_or_exception_shows_a_credential(
    moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy], tmp_path: Path, s3_credentials: dict[str, str]
) -> None:
    proxy = fault_proxy(moto)
    proxy.add("status", key="0000000001.zip", status=403, code="InvalidAccessKeyId", times=10)
    proxy.add("status", "list", skip=1, status=403, code="SignatureDoesNotMatch", times=1)
    environment = {**os.environ, **s3_credentials, "AWS_SESSION_TOKEN": TOKEN}
    root = f"s3://{BUCKET}/{tmp_path.name}"
    argv = [sys.executable, "-c", SCENARIO, root, proxy.endpoint, str(tmp_path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]
    said = {"stdout": done.stdout, "stderr": done.stderr}
    said |= {str(p): p.read_bytes().decode("latin-1") for p in tmp_path.rglob("*") if p.is_file()}
    said |= {key: moto.content(key).decode("latin-1") for key in moto.keys(f"{tmp_path.name}/")}
    assert len(said) > 4
    assert "Traceback" in done.stderr
    for secret in (ACCESS_KEY, SECRET_KEY, TOKEN, "SENTINEL"):
        shown = [f"{where}: ...{text[max(0, text.find(secret) - 200) :][:400]}" for where, text in said.items() if secret in text]
        assert shown == []
