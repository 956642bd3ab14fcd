"Tutorials show their pictures without a kernel; every command in README and docs is one that its parser takes, and the common ones run; the catalogue of errors is whole."
import html
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
TUTORIALS = sorted((NBS / "tutorials").glob("*.ipynb"))
GUIDES = [NBS / "index.ipynb", *TUTORIALS, *sorted((NBS / "explanations").glob("*.ipynb"))]


def cells(path): return json.loads(path.read_text())["cells"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    "Every tutorial as `jupyter nbconvert --to html` writes it: nothing is run"
    out = tmp_path_factory.mktemp("html")
    r = subprocess.run([sys.executable, "-m", "nbconvert", "--to", "html", "--output-dir", out, *TUTORIALS], capture_output=True, text=True, env={**os.environ, "JUPYTER_PREFER_ENV_PATH": "1"})
    assert r.returncode == 0, r.stderr[-2000:]
    return {p.stem: (out / f"{p.stem}.html").read_text() for p in TUTORIALS}


class Pictures(HTMLParser):
    "Pictures of a page and their size in characters"
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)
    def handle_starttag(self, tag, attrs):
        src = dict(attrs).get("src") or ""
        if tag == "img" and src.startswith("data:image/"): self.found.append(len(src))


def test_tutorials_show_their_pictures_without_a_kernel(exported):
    for name, page in exported.items():
        pictures = Pictures(page).found
        assert pictures and min(pictures) > 2000, f"{name}: {pictures}"
        assert "application/vnd.jupyter.widget-view+json" not in page, f"{name} has a widget that needs its state"


@pytest.mark.parametrize("path", GUIDES, ids=lambda p: p.stem)
def test_guides_are_stored_as_they_ran(path):
    "No error, nothing on stderr, no widget alone, every value there"
    nb = json.loads(path.read_text())
    assert not nb["metadata"].get("widgets")
    for c in nb["cells"]:
        if c["cell_type"] != "code": continue
        source = "".join(c["source"])
        for o in c["outputs"]:
            assert o["output_type"] != "error" and o.get("name") != "stderr", (source[:80], o)
            data = o.get("data", {})
            assert not [k for k in data if "widget" in k] or {"text/html", "image/png"} & set(data), source[:80]
        last = source.strip().splitlines()[-1]
        if re.match(r"(print\(|Markdown\(|timeline_figure\()", last): assert c["outputs"], f"{path.name} was not run: {source[:80]}"


def test_the_catalogue_holds_every_known_text():
    "As it is stored, so as it is shown"
    from shardnb.run.translate import KNOWN
    from shardnb.plan.problem import ShardnbError
    text = "".join("".join(o["data"].get("text/html", "")) for c in cells(NBS / "explanations" / "02_errors.ipynb") if c["cell_type"] == "code" for o in c["outputs"] if "data" in o)
    shown = html.unescape(re.sub(r"</?code>", "`", text)).replace("`", "")
    assert not [k.name for k in KNOWN if k.said.replace("`", "") not in shown or k.what.replace("`", "") not in shown or any(f.replace("`", "") not in shown for f in k.fix)]
    assert not [k.name for k in KNOWN if k.quoted and html.escape(k.quoted) not in text]
    told = re.findall(r"^class (\w+)\((?:ShardnbError|RecipeError|PlanError|RunFailed)\b", "\n".join(p.read_text() for p in (ROOT / "shardnb").rglob("*.py")), re.M)
    assert len(told) > 5 and not [n for n in [ShardnbError.__name__, *told] if f"error-{n.lower()}" not in text], told


def test_a_kept_output_is_not_taken_when_what_it_comes_from_has_changed(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    spec.loader.exec_module(build := importlib.util.module_from_spec(spec))
    there = [SimpleNamespace(name="torch", version="2.13.0")]
    monkeypatch.setattr(build, "distributions", lambda: there)
    seen = [build.surroundings(tmp_path)]
    for name in ("shardnb/recipes/mine.yaml", "shardnb/plan/part.py", "nbs/plan/_cases.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one")
        seen.append(build.surroundings(tmp_path))
        path.write_text("two")
        seen.append(build.surroundings(tmp_path))
        assert seen[-1] == build.surroundings(tmp_path)
    there[0].version = "2.14.0"
    seen.append(build.surroundings(tmp_path))
    assert len(set(seen)) == len(seen) == 8


def test_the_parts_of_the_suite_have_budgets(monkeypatch):
    import suite
    monkeypatch.setattr(suite, "PACE", 1)
    assert sum(seconds for _, seconds in suite.PARTS.values()) < 25 * 60
    assert suite.slow_tutorials(["01_first_sharded_finetune.ipynb: 181 secs", "04_choosing.ipynb: 180 secs", "01_sharding_settings.ipynb: 999 secs"]) == ["01_first_sharded_finetune.ipynb: 181 of 180 s"]


def commands():
    "[(guide, line)]: what is written as a command, in fences and between backticks"
    found = []
    for path in GUIDES:
        for c in cells(path):
            source = "".join(c["source"])
            lines = [m.strip() for m in re.findall(r"`((?:%{1,2}shard|shardnb )[^`\n]*)`", source)] if c["cell_type"] == "markdown" else []
            blocks = re.findall(r"```\w*\n(.*?)```", source, re.S) if c["cell_type"] == "markdown" else [source]
            lines += [line.strip() for b in blocks for line in b.splitlines() if re.match(r"\s*(%{1,2}shard\w+|shardnb (?=[a-z]))", line)]
            found += [(path.stem, line.split("  #")[0].strip()) for line in lines if "…" not in line]
    return sorted(set(found))


def parsed(line):
    "A command as its own parser reads it"
    from shardnb.ui.cli import COMMANDS, command_parser
    from shardnb.ui.magics import _ABOUT, _parser
    from shardnb.ui.options import parse_options, recipe_of, split_line
    words = split_line(line)
    if words[0] == "shardnb":
        if len(words) == 1 or words[1].startswith("-"): return
        assert words[1] in COMMANDS, line
        ns = parse_options(command_parser(words[1]), words[2:]) if len(words) > 2 else None
    else:
        assert words[0].lstrip("%") in _ABOUT, line
        ns = parse_options(_parser(words[0]), words[1:])
    if ns is not None and not getattr(ns, "recipe", None) and getattr(ns, "id", None) is None and len(vars(ns)) > 2: recipe_of(ns)


def test_every_command_in_the_docs_is_one():
    "Options exist, and their values are taken"
    bad, all_of_them = [], commands()
    for where, line in all_of_them:
        try: parsed(line)
        except Exception as e: bad.append(f"{where}: {line}\n   {e}")
    assert len(all_of_them) > 20 and not bad, "\n".join(bad)


def test_signatures_name_classes_as_a_reader_does(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import to_myst
    shown = to_myst.output(dict(data={"text/markdown": "```python\ndef f(\n    q:__main__.Question, now:int=0\n)->__main__.Run:\n```"}), "../")["data"]["text/markdown"]
    assert "q:Question, now:int=0" in shown and ")->Run:" in shown


def test_a_recipe_that_is_given_a_file_names_its_split():
    "Recipes of the library take a slice of a data set on the hub, which a file of one's own doesn't have"
    from shardnb.plan.library import library
    lines = [(where, line, name) for where, line in commands() for name in library() if re.search(rf"\b{re.escape(name)} .*--dataset \S+\.jsonl", line)]
    assert lines and not [line for _, line, name in lines if "\nsplit:" in library()[name].text and "--split train" not in line]


@pytest.fixture
def folder(tmp_path):
    "A place where the docs' names exist: recipe.yaml, rows.jsonl, my-model"
    (tmp_path / "recipe.yaml").write_text("model: tiny\ndataset: rows.jsonl\nstrategy: zero3\nnproc: 2\nprecision: fp32\nmicro_batch: 1\ngrad_accum: 1\nmax_length: 64\nmax_steps: 3\nsave_steps: 2\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"A number, {i}."}]}) + "\n" for i in range(40)))
    return tmp_path


def shardnb(folder, line, code=0, limit=300):
    words = shlex.split(line)
    r = subprocess.run([sys.executable, "-m", "shardnb.ui.cli", *words[1:]], cwd=folder, capture_output=True, text=True, env={**os.environ, "SHARDNB_HOME": str(folder / "home")}, timeout=limit)
    assert r.returncode == code, f"{line}: {r.returncode}\n{r.stdout[-2000:]}{r.stderr[-2000:]}"
    return r.stdout


def test_the_commands_of_readme_run(folder):
    "In one folder, one after the other, as a reader would: plan, train, list, attach, logs, resume"
    assert "▸" in shardnb(folder, "shardnb plan recipe.yaml --machine 2xT4")   # the recommended row
    said = shardnb(folder, "shardnb train recipe.yaml")
    assert "saved:" in said
    run = re.search(r"\d{8}-\d{6}-zero3-\w+", shardnb(folder, "shardnb runs"))[0]
    assert "done" in shardnb(folder, f"shardnb attach {run}")
    shardnb(folder, f"shardnb logs {run} --rank 1")
    assert "done" in shardnb(folder, f"shardnb resume {run} --max-steps 4")


@pytest.mark.slow
def test_the_demo_of_readme_runs(tmp_path):
    "The demo trains the real model and answers before and after; tests/browser/test_lab.py opens what `make lab` opens"
    shardnb(tmp_path, "shardnb demo --folder pictures", limit=360)   # six minutes are what `make demo` may take
    assert list((tmp_path / "pictures").glob("*.png"))
