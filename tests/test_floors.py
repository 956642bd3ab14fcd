"""Imports go down only: plan < run < ui, those inside functions included. The package's front door may name every floor, and a lower floor asks it for a few methods alone."""
import ast
from pathlib import Path

import pytest

import shardnb

PACKAGE = Path(shardnb.__file__).parent
FLOORS = ["plan", "run", "ui"]
MODULES = sorted(p for floor in FLOORS for p in (PACKAGE / floor).glob("*.py"))


def imported(path):
    "(line, dotted name under shardnb) of every import of this package in a module, wherever it stands"
    package = ["shardnb", path.parent.name]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.split(".")[0] == "shardnb")
        if isinstance(node, ast.ImportFrom):
            start = package[:len(package) - node.level + 1] if node.level else []
            whole = ".".join([*start, *filter(None, [node.module])])
            if whole.split(".")[0] == "shardnb": yield from ((node.lineno, f"{whole}.{a.name}") for a in node.names)


def floor_of(name):
    "The floor of shardnb.run.handle, or of shardnb.train; None for the front door's own names"
    first = name.split(".")[1] if "." in name else ""
    if first in FLOORS: return FLOORS.index(first)
    return FLOORS.index(shardnb._HOMES[first].split(".")[0]) if first in shardnb._HOMES else None


@pytest.mark.parametrize("path", MODULES, ids=[f"{p.parent.name}.{p.stem}" for p in MODULES])
def test_imports_go_down(path):
    mine = FLOORS.index(path.parent.name)
    up = [f"line {line}: {name}" for line, name in imported(path) if (floor := floor_of(name)) is not None and floor > mine]
    assert not up, f"{path.parent.name}/{path.name} imports from a higher floor: {up}"


def test_a_lower_floor_names_a_higher_one_nowhere_else():
    "No detour through importlib, sys.modules or a bare `import shardnb`"
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__"): raise AssertionError(f"{path}:{node.lineno}")
        if path.parent.name != "ui": assert {n for _, n in imported(path) if n.count(".") <= 1} <= {"shardnb.upstairs"}, path


def test_what_is_asked_of_the_front_door_is_there():
    for method, target in shardnb.UPSTAIRS.items():
        home, name = target.split(":")
        tree = ast.parse((PACKAGE / (home.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
        assert name in {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}, method
        cls = getattr(shardnb, method.split(".")[0])
        assert callable(getattr(cls, method.split(".")[1]))


def test_the_check_sees_what_it_should(tmp_path):
    (tmp_path / "plan").mkdir()
    p = tmp_path / "plan" / "bad.py"
    p.write_text("def f():\n    from ..run.handle import train\n    import shardnb.ui.panel\n    from shardnb import attach, upstairs\n    from . import recipe\n    from .. import run\n")
    seen = [(n, floor_of(n)) for _, n in imported(p)]
    assert sorted(seen, key=str) == sorted([("shardnb.run.handle.train", 1), ("shardnb.ui.panel", 2), ("shardnb.attach", 1), ("shardnb.upstairs", None), ("shardnb.plan.recipe", 0), ("shardnb.run", 1)], key=str)
