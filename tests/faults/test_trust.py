"What others may have written, and what must not be written: HTML in names and logs, paths in ids, YAML tags, planted pickles, tokens. None gets through."
import html
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from unruly import ended, family

import shardnb
from shardnb.plan.problem import RecipeError, ShardnbError
from shardnb.plan.recipe import Recipe
from shardnb.run.event import EventWriter
from shardnb.run.handle import Run
from shardnb.run.registry import attach
from shardnb.run.process import proc_id
from shardnb.run.rundir import RunDir, RunNotFound, write_json

# HTML and scripts

BAD = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'><b>$\\frac{x}$ $"


@pytest.fixture
def hostile(tmp_path):
    "A run in which everything that a model, a data set, a rank or a cell can name is HTML"
    plan = dict(strategy="ddp", nproc=2, world_size=2, model=BAD, dataset=BAD, notes=[BAD], settings={BAD: BAD}, machine=BAD, kind="recipe")
    rd = RunDir.create("model: tiny\n", cell=f"x = {BAD!r}\n", plan=plan, home=tmp_path)
    for r in (0, 1):
        w = EventWriter(rd.event_path(r), r)
        w.write("start", **proc_id(), node=0, local_rank=r, world_size=2, host=BAD)
        w.write("phase", phase="training", state="begin")
        w.write("progress", what=BAD, done=1, total=2, unit=BAD)
        w.write("effective", engine=BAD, wrapper=BAD, world_size=2, settings={BAD: BAD})
        w.write("shards", rows=[[BAD, [2, 3], 3, BAD, 0]], total=1)
        for s in (1, 2):
            w.write("step", step=s, total_steps=4, loss=1. / s, lr=.1)
            w.write("memory", step=s, moment="peak", place="device", bytes={"params": 10, BAD: 5, "total": 15}, phase=BAD)
        w.write("warning", message=BAD, fix=BAD), w.write("note", message=BAD + "note"), w.write("sample", when="before", prompt=BAD, text=BAD)
        w.write("log", step=1, values={BAD: 1.})
        w.write("checkpoint", path=BAD, step=2, complete=True)
        rd.log_path(r).write_text(f"{BAD}\n\x1b[2J{BAD}\n")
    write_json(rd.state_path, dict(state="running", supervisor=proc_id(), ranks={}, host=socket.gethostname(), heartbeat=time.time()))
    return rd


def end(rd):
    write_json(rd.exit_path, dict(v=1, state="failed", ended_at=time.time(), returncodes={}, note=BAD, summary={}, error=dict(
        rank=1, phase=BAD, step=2, cause=BAD, message=BAD, fix=BAD, traceback=BAD, cell_line=1, cell_text=BAD, others=[BAD], stacks={"0": BAD},
        suggestions=[dict(options=BAD, words=BAD, peak_bytes=1)])))


class Reader(HTMLParser):
    "Reads a page as a browser does, and keeps what could run"
    def __init__(self):
        super().__init__()
        self.runs = []
    def handle_starttag(self, tag, attrs):
        d = dict(attrs)
        self.runs += [(tag, d)] * (tag in ("script", "iframe", "object") or any(k.startswith("on") for k in d) or d.get("src") == "x" or (d.get("href") or "").startswith("javascript:"))


def harmless(page):
    "What a browser would make of it has nothing that came from `BAD`"
    reader = Reader()
    reader.feed(page)
    assert page and not reader.runs, reader.runs
    return True


def test_the_check_sees_what_it_should():
    for bad in (BAD, "<p onclick='x()'>", "<a href='javascript:x()'>"):
        with pytest.raises(AssertionError): harmless(bad)
    assert harmless(html.escape(BAD)) and harmless(f"<img alt='{html.escape(BAD)}' src='data:x'>")


def pages(run):
    from shardnb.ui import card, panel
    yield from (card.header_html(run), card.error_html(run) or " ", card.notes_html(run), card.shards_html(run), card.settings_html(run), card.log_html(run), run._repr_html_())
    yield from (v for k, v in panel.static_bundle(run).items() if k == "text/html")


def test_html_in_a_run_stays_text(hostile):
    run = Run(hostile)
    assert all([harmless(p) for p in pages(run)])
    end(hostile)
    run = Run(hostile)
    assert run.state == "failed" and all([harmless(p) for p in pages(run)])
    assert html.escape("<script>alert(1)") in "".join(pages(run))  # it is shown, as text
    assert harmless(shardnb.RunFailed(run.error, run)._repr_html_())


def test_html_in_the_live_panel_stays_text(hostile):
    from shardnb.ui.panel import Panel
    p = Panel(Run(hostile)).build()
    p._refresh(force=True)
    try: assert all([harmless(w.value) for w in (p.header, p.notes, *p.folds.values())])
    finally: p.close()


def test_html_in_the_rows_of_a_data_set_stays_text(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(dict(prompt=BAD, completion=BAD)) + "\n")
    shown = Recipe(model="tiny", dataset=str(tmp_path / "rows.jsonl")).preview(1)
    assert "alert(1)" in shown._repr_html_() and harmless(shown._repr_html_())


def test_html_in_a_recipe_and_its_plan_stays_text(tmp_path, monkeypatch):
    from shardnb.ui.picker import pick
    (folder := tmp_path / "<img src=x onerror=alert(1)>").mkdir()
    from shardnb.run.models import resolve_model
    for f in os.scandir(resolve_model("tiny")): shutil.copy(f, folder)
    r = Recipe(model=str(folder), dataset="demo")
    from shardnb.ui.planned import plan_bundle
    assert harmless(plan_bundle(shardnb.plan(r, machine="2xT4"))["text/html"])
    def values(w):
        yield from (v for v in (getattr(w, "value", None),) if isinstance(v, str) and type(w).__name__ == "HTML")
        for c in getattr(w, "children", ()): yield from values(c)
    p = pick(r)
    try:
        p.read(background=False)
        seen = [v for v in values(p.widget) if v]
    finally: p.close()
    assert any(html.escape("<img src=x onerror=alert(1)>") in v for v in seen) and all([harmless(v) for v in seen])


# Ids and paths

@pytest.mark.parametrize("id", ["../../etc", "..", "/etc/passwd", "x/../../y", "a\\..\\b", "%2e%2e/x", "~root", "x\x00y", ".", "-rf"])
def test_ids_stay_in_their_folder(id, tmp_path, capsys, monkeypatch):
    from shardnb.ui.cli import main
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    RunDir.create("model: tiny\n", plan={})
    with pytest.raises(RunNotFound): attach(id)
    for command in ("attach", "stop", "logs"): assert main([command, "--", id]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("rank", ["../../../etc/passwd", "../supervisor", "0/../1", -1, "-1", 99])
def test_ranks_stay_in_their_folder(rank, tmp_path):
    rd = RunDir.create("model: tiny\n", plan={"nproc": 2}, home=tmp_path)
    with pytest.raises(LookupError): Run(rd).logs(rank)


def test_a_link_in_the_list_of_runs_is_no_way_out(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("x")
    rd = RunDir.create("model: tiny\n", plan={}, home=tmp_path)
    (rd.path.parent / "20990101-000000-ddp-beef").symlink_to(tmp_path / "elsewhere")
    assert RunDir.list(tmp_path) == [rd]


# YAML, JSON, pickles, hub code

TAGS = ["!!python/object/apply:os.system ['touch {}']", "!!python/object/new:subprocess.Popen [['touch', '{}']]", "!!python/name:os.system", "!!python/module:os",
        "!!python/object/apply:builtins.exec [\"open('{}', 'w')\"]", "!custom x"]


@pytest.mark.parametrize("tag", TAGS)
def test_yaml_tags_make_nothing(tag, tmp_path):
    mark = tmp_path / "mark"
    with pytest.raises(RecipeError): Recipe.from_yaml(f"model: {tag.format(mark)}\n")
    assert not mark.exists()


class Trap:
    "Unpickling it leaves a mark"
    def __init__(self, mark): self.mark = mark
    def __reduce__(self): return os.mkdir, (str(self.mark),)


def foreign(path, how):
    "Make a file what another user could have planted"
    if how == "another user's file":
        if os.getuid(): pytest.skip("only root can give a file away")
        os.chown(path, 12345, -1)
    elif how == "a link":
        path.rename(path.with_suffix(".real"))
        path.symlink_to(path.with_suffix(".real"))
    else: path.parent.chmod(0o777)


HOWS = ["another user's file", "a link", "a folder open to all"]


@pytest.fixture
def public():
    "A folder that other users may enter; pytest's own they may not"
    with tempfile.TemporaryDirectory() as d:
        Path(d).chmod(0o755)
        yield Path(d)


@pytest.mark.parametrize("how", HOWS)
def test_a_planted_result_is_not_unpickled(how, public, tmp_path):
    rd = RunDir.create("model: tiny\n", plan={"strategy": "ddp", "nproc": 1}, home=public)
    (public / "runs").chmod(0o755)
    write_json(rd.exit_path, {"state": "done", "error": None})
    rd.result_path.write_bytes(pickle.dumps(Trap(tmp_path / "mark")))
    foreign(rd.result_path, how)
    with pytest.raises(ShardnbError, match="is not unpickled: a pickle can run any code"): print(Run(rd).result)
    assert not (tmp_path / "mark").exists()


def test_planted_inputs_are_not_unpickled(start, public, tmp_path):
    "By no rank: the run fails and says why"
    (public / "x.pkl").write_bytes(pickle.dumps(Trap(tmp_path / "mark")))
    foreign(public / "x.pkl", "a folder open to all")
    run = start(f"from shardnb.run.rundir import read_own; from pathlib import Path; import pickle; pickle.loads(read_own(Path({str(public / 'x.pkl')!r})))", rank=0)
    assert ended(run)["state"] == "failed" and "is not unpickled" in run.error.message and not (tmp_path / "mark").exists()
    import inspect

    from shardnb.run import worker
    assert "load(read_own(self.rundir.inputs_path))" in inspect.getsource(worker.Worker.run_cell)  # as the real rank reads them


@pytest.mark.parametrize("how", HOWS)
def test_a_planted_checkpoint_is_not_resumed_from(how, public, monkeypatch):
    "Its optimizer is a pickle"
    from shardnb.run.resumption import resume_problems
    monkeypatch.setenv("SHARDNB_HOME", str(public))
    rd = RunDir.create("model: tiny\ndataset: demo\nnproc: 2\n", plan={"strategy": "ddp", "nproc": 2, "kind": "recipe"})
    write_json(rd.exit_path, {"state": "stopped", "error": None})
    for p in (public / "runs", rd.path, rd.checkpoints_path): p.chmod(0o755)
    (folder := rd.checkpoints_path / "checkpoint-4").mkdir()
    (folder / "optimizer.pt").write_bytes(b"x")
    ckpt = next(iter(Run(rd).checkpoints), None) or type("C", (), dict(path=folder, step=4, strategy="ddp"))
    assert not [p for p in resume_problems(Run(rd), Run(rd).recipe, Run(rd).recipe, ckpt) if "pickles" in p.message]
    foreign(folder / "optimizer.pt", how)
    assert [p.field for p in resume_problems(Run(rd), Run(rd).recipe, Run(rd).recipe, ckpt) if "a checkpoint holds pickles" in p.message] == ["resume"]


def test_code_of_a_model_s_repository_needs_leave(tmp_path, monkeypatch):
    "A model that brings its own code is refused, and its code is not run, unless trust_remote_code was asked for"
    mark = tmp_path / "mark"
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(dict(model_type="sly", architectures=["SlyForCausalLM"], auto_map={"AutoConfig": "sly.SlyConfig", "AutoModelForCausalLM": "sly.SlyForCausalLM"})))
    (model / "sly.py").write_text(f"open({str(mark)!r}, 'w')\nfrom transformers import PretrainedConfig\nclass SlyConfig(PretrainedConfig): model_type = 'sly'\n")
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path / "home"))
    with pytest.raises(RecipeError) as e: shardnb.train(Recipe(model=str(model), dataset="demo", nproc=1, max_steps=1))
    assert "trust_remote_code" in str(e.value) and not mark.exists() and not list(tmp_path.glob("home/runs/*/logs/rank*"))


# Tokens

TOKEN, KEY, LOOSE = "hf_" + "aB3dE5gH7j" * 3, "wandb-0123-secret-4567", "ghp_" + "x1Y2z3" * 6


def everything(folder):
    "All bytes under a folder"
    return b"\n".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())


@pytest.fixture
def tokens(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN), monkeypatch.setenv("WANDB_API_KEY", KEY)


LEAK = """
import logging
print("token", os.environ["HF_TOKEN"], [os.environ["WANDB_API_KEY"]])
print({k: v for k, v in os.environ.items() if "TOKEN" in k or "API" in k}, file=sys.stderr)
logging.warning("Authorization: Bearer %s", LOOSE)
events.write("note", message="login with " + os.environ["HF_TOKEN"]), events.write("log", step=3, values={"x": 1}, who=LOOSE)
os.write(2, os.environ["HF_TOKEN"].encode() + b"\\n")  # as native code prints
import subprocess; subprocess.run(["sh", "-c", "echo child $WANDB_API_KEY"])
raise ValueError("401 for " + os.environ["WANDB_API_KEY"] + " and " + LOOSE)
"""


def test_a_rank_has_the_tokens_and_no_file_has_them(start, tokens):
    run = start(f"LOOSE = {LOOSE!r}; " + LEAK.strip().replace("\n", "\n"), others="", rank=1)
    plan = run.rundir.plan_path  # the test's own instructions are in plan.json, masked as all that is written there
    assert LOOSE.encode() not in plan.read_bytes()
    assert ended(run)["state"] == "failed"
    for what in (everything(run.dir).decode(errors="replace"), str(run.error), repr(run), run._repr_html_(), str(shardnb.RunFailed(run.error, run)), run.logs(1), json.dumps(run.events())):
        for secret in (TOKEN, KEY): assert secret not in what
    log = run.logs(1)
    assert "token hf_*** ['***']" in log and "child ***" in log and log.count("hf_***") >= 3  # the rank had them, or there would be nothing to mask


def test_the_rank_that_ships_keeps_them_too(tokens, tmp_path, monkeypatch):
    "A cell prints them, and its error has them; a variable of the notebook is a third one"
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    cell = ("import os\nprint('here', os.environ['HF_TOKEN'], os.environ['WANDB_API_KEY'], mine)\nos.system('echo child $HF_TOKEN')\nlog(loss=1.)\n"
            "raise RuntimeError('denied for ' + os.environ['WANDB_API_KEY'] + mine)\n")
    run = shardnb.train(Recipe(nproc=2, strategy="ddp"), cell=cell, inputs={"mine": LOOSE})
    try: ended(run)
    finally:
        if not run.ended: run.kill()
    assert run.error.message == "RuntimeError: denied for ***ghp_***" and "here hf_*** *** ghp_***" in run.logs(0) and "child hf_***" in run.logs(0)
    assert not [s for s in (TOKEN, KEY, LOOSE) if s.encode() in everything(run.dir)]


def test_a_recipe_takes_no_token(tokens):
    for given in (dict(env={"HF_TOKEN": TOKEN}), dict(env={"HARMLESS": LOOSE}), dict(env={"HTTPS_PROXY": "http://me:hunter22@proxy:1"}), dict(model=TOKEN), dict(dataset=LOOSE)):
        with pytest.raises(RecipeError) as e: Recipe(**given)
        assert not any(s in str(e.value) + repr(e.value.problems) for s in (TOKEN, LOOSE, "hunter22")), given
    for key in ("hf_token", "token"):
        with pytest.raises(RecipeError) as e: Recipe.from_dict({key: TOKEN})
        assert TOKEN not in str(e.value)


def test_tokens_among_the_notebook_s_variables_are_in_no_file(tokens, tmp_path):
    from shardnb.run.cell import Cell, collect
    cell = Cell("print(token, nested, login)")
    data = collect(cell, dict(token=TOKEN, nested=[{"key": LOOSE}], login=lambda: LOOSE))
    rd = RunDir.create("model: tiny\n", cell=cell.text, inputs=data, plan={"env": {"X": "1"}, "notes": [f"x {TOKEN}"]}, home=tmp_path)
    assert not any(s.encode() in everything(rd.path) for s in (TOKEN, LOOSE))
    # and another process, which inherits the environment as ranks do, has the values
    code = "import sys; from shardnb.run.cell import load; v = load(open(sys.argv[1], 'rb').read()); print(v['token'], v['nested'][0]['key'], v['login']())"
    assert subprocess.run([sys.executable, "-c", code, rd.inputs_path], capture_output=True, text=True).stdout.split() == [TOKEN, LOOSE, LOOSE]


def test_a_token_in_the_cell_s_text_is_told(tmp_path, monkeypatch):
    from shardnb.run import start
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    monkeypatch.setattr(start.LocalLauncher, "start", lambda self, rundir: None)
    with pytest.warns(UserWarning, match="line 2 of the cell holds what looks like a token") as w: start._start("model: tiny\n", f"x = 1\nlogin({LOOSE!r})", {"nproc": 1}, None)
    assert LOOSE not in str(w[0].message)


def test_all_that_a_run_leaves_is_for_its_owner_alone(start):
    old = os.umask(0)
    try: run = start("print('x'); open(rundir.path / 'made_by_the_cell', 'w')", steps=4)
    finally: os.umask(old)
    family(run), ended(run)
    assert run.dir.stat().st_mode & 0o777 == 0o700
    ours = [p for p in run.dir.rglob("*") if p.name != "made_by_the_cell" and "elastic" not in p.relative_to(run.dir).parts]
    assert len(ours) > 8 and not [p for p in ours if p.stat().st_mode & 0o077]


def test_another_user_s_runs_are_not_in_the_way(public):
    "A folder in the registry that this user can't enter"
    mine, theirs = (RunDir.create("model: tiny\n", plan={"strategy": "ddp", "nproc": 1}, home=public) for _ in "12")
    theirs.path.chmod(0)
    root = os.getuid() == 0  # who enters everywhere, and so steps down for a moment
    if root:
        for p in (public, public / "runs", mine.path, mine.recipe_path): os.chown(p, 12345, -1)
        os.seteuid(12345)
    try: assert RunDir.list(public) == [mine]
    finally:
        if root: os.seteuid(0)
        theirs.path.chmod(0o700)
    assert len(RunDir.list(public)) == 2


def test_a_pool_of_another_s_making_is_not_used(tmp_path, monkeypatch):
    "Its folder was there before, and others may write to it: a cold start is the way then"
    from shardnb.run.pool import Cold, pool_dir
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (planted := tmp_path / f"shardnb-pool-{os.getuid()}").mkdir()
    planted.chmod(0o777)
    with pytest.raises(Cold, match="is not this user's alone"): pool_dir({})
    planted.chmod(0o700)
    assert pool_dir({}).stat().st_mode & 0o777 == 0o700
