"""The wheel without any extra, in an empty environment: imports, writes, reads, inspects, audits; and says which extra a role lacks."""

import importlib.metadata
import json
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support import needs

ROOT = Path(__file__).resolve().parent.parent

USE = """
import json, sys
from pathlib import Path
import numpy as np
from fsref.journal import create_run
from fsref.reader import Reader
from fsref.reaper import ConsumerHolder, EnvHolder
from fsref.refs import Dense, Payload, PayloadRef, Schema, routed_experts
from fsref.store import open_root
from fsref.writer import Writer

schema = Schema((routed_experts(layer_ids=range(2), top_k=2, expert_count=8),))
rows = np.arange(12).reshape(3, 2, 2) % 8
with open_root("runs", run="r1", create=True) as store:
    run = create_run(store, "r1", schema)
    ledger = Path("runs/r1/ledger")
    with EnvHolder(store, ledger, run=run, label="a") as env:
        ref = Writer(store, schema, env).put(Payload(np.arange(3, dtype=np.int32), {"routed_experts": Dense(rows)}))
        env.sent("q1", ref.object_ids)
        with ConsumerHolder(store, ledger, run=run) as orc:
            orc.take("q1", {i: ref.byte_count for i in ref.object_ids})
            with Reader(store, schema) as reader:
                got = reader.read(PayloadRef.decode(json.loads(json.dumps(ref.to_json()))))["routed_experts"]
            assert (got.rows == rows).all()
            Path("object").write_text(ref.object_ids[0])
            if "stop" in sys.argv:
                orc.drop(ref.object_ids, "filtered")
loaded = {"torch", "transformers", "verifiers", "obstore", "zarr"} & set(sys.modules)
assert not loaded, loaded
"""


def closure(names: list[str]) -> set[str]:
    """Distributions that the named ones need, without extras."""
    seen: set[str] = set()
    queue = list(names)
    while queue:
        name = queue.pop().lower().replace("_", "-")
        if name in seen:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # a requirement of another platform or Python
        seen.add(name)
        queue += [m[0] for n in needs if "extra ==" not in n and (m := re.match(r"[A-Za-z0-9._-]+", n))]
    return seen


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and its base dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        needs = [
            m[0]
            for line in archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode().splitlines()
            if line.startswith("Requires-Dist: ") and "extra ==" not in line
            if (m := re.match(r"[A-Za-z0-9._-]+", line.removeprefix("Requires-Dist: ")))
        ]
    for name in closure(needs):
        distribution = importlib.metadata.distribution(name)
        tops = {f.parts[0] for f in distribution.files or () if f.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "env" / "bin" / "python"


def run(python: Path, where: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), *args], cwd=where, capture_output=True, text=True, timeout=120, check=False)


def test_the_base_install_writes_reads_inspects_and_audits(python: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, "-c", USE)
    assert done.returncode == 0, done.stderr[-2000:]
    shown = run(python, tmp_path, "-m", "fsref", "inspect", "--run", "r1", "--json", (tmp_path / "object").read_text())
    assert shown.returncode in (0, 1), shown.stderr[-2000:]
    audited = run(python, tmp_path, "-m", "fsref", "audit", "r1", "--json")
    assert audited.returncode == 0, audited.stderr[-2000:] + audited.stdout[-2000:]
    assert json.loads(audited.stdout)["verdict"] == "PROVED"


def test_a_role_without_its_extra_says_which_one(python: Path, tmp_path: Path) -> None:
    for command in ("trainer", "env-server", "inference"):
        done = run(python, tmp_path, "-m", "fsref", command, "--help")
        assert done.returncode == 0, done.stderr
    made = run(python, tmp_path, "-m", "fsref", "run", str(ROOT / "configs" / "local.toml"))
    assert made.returncode != 0
    assert "pip install 'fsref[" in made.stderr
    assert "Traceback" not in made.stderr


def test_configs_and_templates_ship_in_the_wheel(python: Path) -> None:
    (site,) = (python.parent.parent / "lib").glob("python*/site-packages")
    assert (site / "fsref" / "configs" / "local.toml").is_file()
    assert (site / "fsref" / "slurm_templates").is_dir()
    assert (site / "fsref" / "py.typed").is_file()


def test_the_compiled_kernels_ship_in_the_wheel_and_work(python: Path, tmp_path: Path) -> None:
    needs.program("cc")
    done = run(python, tmp_path, "-c", "from fsref.objects import native; print(native.LIBRARY.exists(), native.KERNELS is not None)")
    assert done.stdout.split() == ["True", "True"], done.stderr
