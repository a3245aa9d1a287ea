"""Writes docs/configuration.md from fsref/config/: every key with its type, bounds, default and the string under it.

python tools/config_docs.py            # rewrites the file
python tools/config_docs.py --check    # exit code 1 if it is out of date (a test does this)
"""

import ast
import enum
import sys
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from fsref import config
from fsref.config import run, sampling, sections, slurm, storage, training
from fsref.refs import lints, schema

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

A run is described by one TOML file; some ship with the package, in `configs/` (`fsref run local.toml` finds them anywhere). Every key can
be given on the command line as well, as TOML or as a bare word:

    fsref run local.toml --orchestrator.batch_size 64 --run.fields='["routed_experts"]' --env.0.replicas 1 --trainer.loss.replay false

Unknown keys are refused with the nearest name. The launcher writes what came out to `<run_dir>/config.json`; roles read that file.
No other setting exists: nothing reads environment variables, except that S3 credentials come from where S3 clients look for them.

This page is made by `tools/config_docs.py` from `fsref/config/`.
"""


def docstrings() -> dict[tuple[str, str], str]:
    """The string under each field, by class and field name."""
    out: dict[tuple[str, str], str] = {}
    for module in (run, sampling, training, storage, sections, slurm, schema, lints):
        assert module.__file__ is not None
        for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                out[node.name, ""] = ast.get_docstring(node) or ""
                for at, item in zip(node.body, node.body[1:], strict=False):
                    if isinstance(at, ast.AnnAssign) and isinstance(at.target, ast.Name) and isinstance(item, ast.Expr):
                        value = item.value
                        if isinstance(value, ast.Constant) and isinstance(value.value, str):
                            out[node.name, at.target.id] = " ".join(value.value.split())
    return out


def type_text(hint: Any) -> str:
    """A type with its bounds, for people."""
    if get_origin(hint) is Annotated:
        inner, *meta = get_args(hint)
        return type_text(inner) + "".join(bounds(m) for m in meta if isinstance(m, msgspec.Meta))
    args = get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return " \\| ".join(f"`{m}`" for m in hint)
    if args and all(isinstance(a, str) for a in args):
        return " \\| ".join(f"`{a}`" if a else "empty" for a in args)
    if get_origin(hint) is tuple:
        return f"list of {type_text(args[0])}"
    if get_origin(hint) is dict:
        return "table"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true/false"}.get(getattr(hint, "__name__", ""), "table")


def bounds(meta: msgspec.Meta) -> str:
    """`` >= 1, <= 9`` and the like."""
    found = [f"{sign} {value}" for sign, value in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le)) if value is not None]
    return " " + ", ".join(found) if found else ""


def default_text(field: msgspec.structs.FieldInfo) -> str:
    """The default as TOML."""
    if field.default is not msgspec.NODEFAULT:
        value = msgspec.to_builtins(field.default)
    elif field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        return "required"
    if isinstance(value, float) and value >= 1e5:
        return f"`{value:g}`"
    return f"`{msgspec.json.encode(value).decode()}`" if value or value in (0, False) else "empty"


def section(name: str, title: str, struct: type[msgspec.Struct], docs: dict[tuple[str, str], str]) -> list[str]:
    """One section with its table, then its subsections."""
    about = " ".join(docs[struct.__name__, ""].split("\n\n")[0].split())
    if about.startswith("``["):
        about = about.partition(": ")[2]
    about = (about[:1].upper() + about[1:]).replace("``", "`")
    lines = ["", f"## {title}", *(["", about] if about else []), "", "| key | type | default | meaning |", "|---|---|---|---|"]
    inner: list[str] = []
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        kind = config.struct_of(hint)
        if kind is not None and get_origin(hint) is not tuple:
            inner += section(f"{name}.{field.name}", f"[{name}.{field.name}]", kind, docs)
            continue
        about_field = docs.get((struct.__name__, field.name), "").replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{field.name}` | {type_text(hint)} | {default_text(field)} | {about_field} |")
    return lines + inner


def render() -> str:
    """The whole page."""
    docs = docstrings()
    out = [HEAD.rstrip()]
    for name, hint in get_type_hints(config.Config, include_extras=True).items():
        kind = config.struct_of(hint)
        assert kind is not None, name
        many = get_origin(hint) is tuple
        out += section(name, f"[[{name}]]" if many else f"[{name}]", kind, docs)
    return "\n".join(out) + "\n"


def main(argv: list[str]) -> int:
    """Writes or checks the page."""
    text = render()
    if "--check" in argv:
        return int(not PATH.is_file() or PATH.read_text(encoding="utf-8") != text)
    PATH.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
