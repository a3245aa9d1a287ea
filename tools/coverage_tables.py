"""Writes docs/faults.md and docs/payloads.md: what is broken on purpose, or wrong in the wild, and the tests that show what happens then.

    python -m tools.coverage_tables            # rewrites both pages
    python -m tools.coverage_tables --check    # exit code 1 if one is out of date or has a row without a test (a test does this)

The rows come from tests/catalogue/*.toml, the tests from their marks: ``@pytest.mark.fault(12)``, ``@pytest.mark.payload("A3", "A4")``,
on a function, a parameter or a whole module.
"""

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
FAULTS_HEAD = """# Faults, and the tests that show their outcome

Each row is broken on purpose by at least one test. *gate*: runs with every change; the others are marked slow
(`python -m pytest --slow -m fault`). *layer*: L0 properties and file surgery, L1 seeded simulation, L2 real processes, L3 real
kernel faults, L4 two clients of a network filesystem, L5 a real S3 server behind a fault proxy.

This page is made by `python -m tools.coverage_tables` from the marks of the tests.
"""
PAYLOADS_HEAD = """# What goes wrong in these arrays, and the tests that show what fsref does

Collected from public issue threads and code of RL post-training systems (`repo#N` is a thread; vf = PrimeIntellect-ai/verifiers,
NeMo = NVIDIA-NeMo/RL, TQ = Ascend/TransferQueue, [CR] = read in code). T tokens, P prompt, L layers, K top-k, E experts.

This page is made by `python -m tools.coverage_tables` from the marks of the tests.
"""
REQUIRED_SECTIONS = ("A", "B", "C", "E", "F")
"""Sections of payloads.toml of which every row must have a test."""
REQUIRED_ROWS = ("G1", "G2", "G3", "G8")


def marks(word: str) -> dict[str, list[str]]:
    """Mark argument to the tests that carry it, as ``path::function``."""
    out: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        where = path.relative_to(ROOT).as_posix()
        everywhere = [v for node in tree.body if isinstance(node, ast.Assign) and _is_pytestmark(node) for v in _values(node, word)]
        for function in _tests(tree):
            for value in dict.fromkeys([*everywhere, *_values(function, word)]):
                out[value].append(f"{where}::{function.name}")
    return out


def _is_pytestmark(node: ast.Assign) -> bool:
    return any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)


def _tests(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node


def _values(node: ast.AST, word: str) -> Iterator[str]:
    """The arguments of every ``pytest.mark.<word>(...)`` in the decorators or the value of ``node``."""
    roots = node.decorator_list if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else [node]
    for call in (n for root in roots for n in ast.walk(root) if isinstance(n, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == word and ast.unparse(call.func.value) == "pytest.mark":
            for argument in call.args:
                assert isinstance(argument, ast.Constant), f"pytest.mark.{word} takes plain values, for the table's sake"
                yield str(argument.value)


def _load(name: str, key: str) -> list[dict[str, Any]]:
    return list(tomllib.loads((TESTS / "catalogue" / name).read_text(encoding="utf-8"))[key])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _tests_cell(tests: list[str]) -> str:
    return "<br>".join(f"`{t.removeprefix('tests/')}`" for t in tests)


def faults() -> tuple[str, list[str]]:
    """The page, and the numbers without a test."""
    found = marks("fault")
    lines, lacking, group = [FAULTS_HEAD.rstrip()], [], ""
    for row in _load("faults.toml", "fault"):
        if row["group"] != group:
            group = row["group"]
            lines += ["", f"## {group}", "", "| # | what is done | layer | what must happen | gate | tests |", "|---|---|---|---|---|---|"]
        tests = found.pop(str(row["number"]), [])
        lacking += [] if tests else [f"fault {row['number']}"]
        cells = (str(row["number"]), row["injection"], row["layer"], row["outcome"], "yes" if row["gate"] else "slow")
        lines.append(f"| {' | '.join(map(_cell, cells))} | {_tests_cell(tests)} |")
    return "\n".join(lines) + "\n", lacking + [f"fault {n} is marked, but not in the catalogue" for n in found]


def payloads() -> tuple[str, list[str]]:
    """The page, and the rows without a test that must have one."""
    found = marks("payload")
    lines, lacking, section = [PAYLOADS_HEAD.rstrip()], [], ""
    for row in _load("payloads.toml", "row"):
        if row["section"] != section:
            section = row["section"]
            lines += ["", f"## {section}", "", "| # | symptom | seen in | what fsref does | example | tests |", "|---|---|---|---|---|---|"]
        tests = found.pop(row["id"], [])
        if not tests and (row["id"][0] in REQUIRED_SECTIONS or row["id"] in REQUIRED_ROWS):
            lacking.append(f"payload row {row['id']}")
        cells = (row["id"], row["symptom"], row["source"], row["requirement"], row["input"])
        lines.append(f"| {' | '.join(map(_cell, cells))} | {_tests_cell(tests)} |")
    return "\n".join(lines) + "\n", lacking + [f"payload row {n} is marked, but not in the catalogue" for n in found]


def main(argv: list[str]) -> int:
    """Writes or checks the pages."""
    bad: list[str] = []
    for name, (text, lacking) in {"faults.md": faults(), "payloads.md": payloads()}.items():
        path = ROOT / "docs" / name
        bad += [f"{line}: no test carries its mark" if "marked" not in line else line for line in lacking]
        if "--check" not in argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            bad.append(f"docs/{name} is out of date: run python -m tools.coverage_tables")
    print("\n".join(bad) or "every row has a test")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
