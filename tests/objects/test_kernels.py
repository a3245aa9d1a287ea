"""Forged input under the sanitizers, and where the kernels come from."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsref.objects import native
from tests.support import needs
from tools.build_kernels import FLAGS, SOURCE, compile_kernels

ROOT = Path(__file__).resolve().parents[2]

FUZZ = """
import ctypes, sys
from array import array
import numpy as np
from numcodecs import blosc
from fsref.objects import native

kernels = native.Kernels(ctypes.CDLL(sys.argv[1]))
rng = np.random.default_rng(int(sys.argv[2]))
kernels.use(1 + int(sys.argv[2]) % 2)


def damaged(n):  # what a compressor made, with some bytes changed
    width = pick(1, 2, 4)
    size = int(rng.integers(1, 6000)) * width
    values = rng.integers(0, (2, 40, 256)[n % 3], size).astype(np.uint8)
    options = dict(typesize=width, blocksize=(0, 2048)[n % 2])
    bad = np.frombuffer(blosc.compress(values, b"lz4", 1 + n % 9, blosc.BITSHUFFLE, **options), np.uint8).copy()
    for _ in range(int(rng.integers(0, 4))):
        bad[int(rng.integers(0, min(len(bad), 64) if n % 4 else len(bad)))] = int(rng.integers(256))
    if n % 5 == 0:  # lengths that belong together, so that more is reached
        bad = bad[: int(rng.integers(16, len(bad) + 1))].copy()
        bad[12:16] = np.frombuffer(len(bad).to_bytes(4, "little"), np.uint8)
    return bad, size


def pick(*choices):
    return choices[int(rng.integers(len(choices)))]


def length(value):  # what of it goes to the token, and the bytes that follow
    rest = value - 15
    return min(value, 15), b"" if rest < 0 else b"\\xff" * (rest // 255) + bytes([rest % 255])


def written(n):  # sequences at the edges of what is allowed, in a stream that is cut somewhere
    stream, size = b"", 0
    for _ in range(int(rng.integers(1, 6))):
        literals, match = pick(0, 1, 14, 15, 16, 64, 65, 300), pick(4, 18, 19, 40, 64, 65, 300, 5000)
        (high, more), (low, further) = length(literals), length(match - 4)
        stream += bytes([high << 4 | low]) + more + rng.bytes(literals) + pick(1, 1, 2, 15, 16, 17, 0, 400).to_bytes(2, "little") + further
        size += literals + match
    tail = pick(0, 1, 5, 15, 20)
    stream += bytes([length(tail)[0] << 4]) + length(tail)[1] + rng.bytes(tail)
    size = max(1, size + tail + pick(0, 0, 0, -1, 1, -40, -200, 100, -5000))
    cut = stream[: pick(len(stream), len(stream), int(rng.integers(len(stream))), len(stream) - 1)]
    stated = max(0, len(cut) + pick(0, 0, 0, 0, 1, 16, -1))
    body = (20).to_bytes(4, "little") + stated.to_bytes(4, "little") + cut
    head = bytes([2, 1, 4 | 16 | 1 << 5, 1]) + size.to_bytes(4, "little") + size.to_bytes(4, "little")
    return np.frombuffer(head + (16 + len(body)).to_bytes(4, "little") + body, np.uint8).copy(), size


counts = {}
for n in range(6000):
    bad, size = (damaged if n % 2 else written)(n // 2)
    skip = pick(0, 0, int(rng.integers(size)), size)
    take = pick(size - skip, size - skip, int(rng.integers(size - skip + 1)), 0)
    cut, needed = (0, 0, 0, 0), take
    if n % 3 == 2:  # a part of every row
        pitch = int(rng.integers(1, 300))
        first, count = int(rng.integers(size // pitch + 1)), int(rng.integers(size // pitch + 1))
        count = min(count, size // pitch - first)
        left = int(rng.integers(pitch))
        width = int(rng.integers(1, pitch - left + 1))
        cut = (pitch, left, width, width + int(rng.integers(50)))
        skip, take, needed = first * pitch, count * pitch, (count - 1) * cut[3] + width if count else 0
    out = np.zeros(needed, np.uint8)
    table = array("q", (bad.ctypes.data, len(bad), 0, size, skip, take, out.ctypes.data, *cut))
    room = min(int.from_bytes(bad[8:12].tobytes(), "little"), size) + native.SLACK
    scratch = native.Memory(np.empty(max(0, (1 + (take < size or cut[0] > 0)) * room - pick(0, 0, 0, 1, 40)), np.uint8))
    code, _ = kernels.unpack(table, 1, scratch=scratch)
    counts[n % 2, code] = counts.get((n % 2, code), 0) + 1
    kernels.crc32c(0, bad.ctypes.data, len(bad))
    if not needed:
        continue
    again = np.empty(needed, np.uint8)
    block = pick(needed, max(1, needed // 3))
    made = kernels.pack(out, 1, block, scratch=native.Memory(np.empty(block + native.TABLE_BYTES, np.uint8)))[:-4].copy()
    blosc.decompress(made, again)
    assert np.array_equal(out, again)
print(min(counts.get((which, code), 0) for which in (0, 1) for code in (0, 3)), counts.get((1, 2), 0))
"""
"""Prints how many chunks of either kind were decoded, or found damaged, at least; and how many headers were refused."""


@pytest.mark.fault(57)
def test_forged_chunks_touch_no_byte_beyond_their_buffers(tmp_path: Path) -> None:
    compiler = needs.program("gcc")
    library = tmp_path / "_kernels.so"
    assert compile_kernels(ROOT / SOURCE, library, flags=("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"))
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    settings = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc", "OPENBLAS_NUM_THREADS": "1"}
    for seed in range(2):
        command = [sys.executable, "-c", FUZZ, str(library), str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **settings}, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        decoded_or_damaged, refused = map(int, done.stdout.split())
        assert decoded_or_damaged > 50, "the fuzzing does not reach the decoder"
        assert refused > 500


def test_a_library_that_is_absent_broken_or_of_another_source_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs.program("cc")
    library = tmp_path / "_kernels.so"
    monkeypatch.setattr(native, "LIBRARY", library)
    assert native.load() == (None, "not compiled when fsref was installed: no C compiler, or not x86-64")
    library.write_bytes(b"\x7fELF, not quite")
    assert "does not load" in native.load()[1]
    changed = tmp_path / "kernels.c"
    changed.write_text((ROOT / SOURCE).read_text() + "\n")
    assert compile_kernels(changed, library)
    assert native.load() == (None, "compiled from another kernels.c; install fsref again")


def test_what_cannot_be_compiled_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, library = tmp_path / "kernels.c", tmp_path / "_kernels.so"
    source.write_text("this is not C")
    for compiler in (shutil.which("cc") or "cc", "false", "true", "/no/such/compiler"):
        monkeypatch.setenv("CC", compiler)
        assert not compile_kernels(source, library)
        assert "decoded by numcodecs" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kernels.c"]
    assert not compile_kernels(source, tmp_path / "nobody can write here" / "_kernels.so")
    assert "decoded by numcodecs" in capsys.readouterr().err


def test_the_kernels_compile_without_a_warning(tmp_path: Path) -> None:
    assert {"-Wall", "-Wextra"} <= set(FLAGS)
    needs.program("cc")
    assert compile_kernels(ROOT / SOURCE, tmp_path / "_kernels.so", flags=("-Werror",))
    assert ctypes.CDLL(str(tmp_path / "_kernels.so")).fsref_use(0) == 0
