"""What the source itself must not contain (point 3), and that every way out of it is shut."""

import ast
import pickle
from pathlib import Path

import pytest

from fsref.refs import Codec, Schema, top_logprobs
from fsref.store import Store
from fsref.store.filesystem import FilesystemStore
from fsref.store.objectstorage import ObjectStorageStore
from fsref.store.posix import PosixStore
from tests.support.s3servers import BUCKET, S3Server

ROOT = Path(__file__).parents[2]
FORBIDDEN = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}


def sources() -> list[Path]:
    found = sorted((ROOT / "fsref").rglob("*.py"))
    assert len(found) > 100
    return found


def test_no_module_imports_a_serialiser_that_runs_code() -> None:
    bad = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            bad += [f"{path}:{n}" for n in names if n.split(".")[0] in FORBIDDEN]
    assert bad == []


def test_nothing_evaluates_text_and_numpy_and_torch_never_unpickle() -> None:
    bad = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            where = ast.unparse(node.func)
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if name in CALLS or keywords.get("allow_pickle") == "True" or keywords.get("shell") == "True":
                bad.append(f"{path}:{node.lineno}: {where}")
            if where == "torch.load" and keywords.get("weights_only") != "True":
                bad.append(f"{path}:{node.lineno}: {where} without weights_only=True")
            bench = "bench" in path.relative_to(ROOT).parts  # it reads with others' tools to compare, files of its own and the user's
            if not bench and where in ("np.load", "numpy.load", "zarr.open", "zarr.open_group", "zarr.open_array"):
                bad.append(f"{path}:{node.lineno}: {where}: this package reads its own format itself")
    assert bad == []


@pytest.mark.usefixtures("s3_credentials")
def test_no_store_can_be_pickled(tmp_path: Path, moto: S3Server) -> None:
    stores: list[Store] = [
        PosixStore(tmp_path / "r1", create=True),
        FilesystemStore("memory://root/r1"),
        ObjectStorageStore(f"s3://{BUCKET}/security/r1", settings=moto.settings()),
    ]
    for store in stores:
        with store, pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(store)


def test_codecs_and_dtypes_are_lists_of_what_is_allowed() -> None:
    for name in ("pickle", "gzip", "lzma", "vlen-utf8", ""):
        with pytest.raises(ValueError, match="Invalid enum value"):
            __import__("msgspec").convert({"name": name}, Codec)
    assert Schema((top_logprobs(),)).codec.name == "lz4"
