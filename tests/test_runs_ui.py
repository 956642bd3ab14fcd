"The list of runs with its buttons, and deleting: what goes, what stays, who is asked."
import io
import json
import os
import shutil
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
from ipywidgets.widgets.widget import _instances
from waiting import within

import shardnb
from shardnb.plan.recipe import Recipe
from shardnb.run.handle import Run
from shardnb.run.registry import saved_outside
from shardnb.run.process import proc_id
from shardnb.run.rundir import RunDir, write_json
from shardnb.ui.cli import main
from shardnb.ui.runs import RunTable


until = within(10, .02)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def made(state="done", step=3, output_dir=None, **plan):
    "A run as it lies on the disk; state None: it has just begun"
    rd = RunDir.create(Recipe(model="tiny", dataset="demo", output_dir=output_dir), plan={"strategy": "zero3", "nproc": 2, "model": "tiny"} | plan)
    if state: write_json(rd.exit_path, {"state": state, "error": None, "summary": {"step": step, "loss": 2.5, "peak_bytes": 2**30}})
    return Run(rd)


def saved(run, folder, step=3):
    "A checkpoint of a run, with its marker"
    ckpt = folder / f"checkpoint-{step}"
    ckpt.mkdir(parents=True)
    (ckpt / "model.bin").write_bytes(b"x" * 10)
    write_json(ckpt / "shardnb.json", {"v": 1, "step": step, "run": run.id, "strategy": "zero3", "world_size": 2, "files": {"model.bin": 10}})
    return ckpt


def test_only_the_runs_own_folder_goes(tmp_path):
    out = tmp_path / "out"
    run = made(output_dir=str(out))
    mine, other, note = saved(run, out), saved(made(), out, 9), out / "note.txt"
    note.write_text("mine")
    assert [c.path for c in saved_outside(run)] == [mine]
    assert run.delete() == [run.dir] and mine.exists() and not run.dir.exists()

    again = made(output_dir=str(out))
    hers = saved(again, out, 4)
    assert again.delete(outputs=True) == [hers, again.dir]
    assert mine.exists() and other.exists() and note.exists() and not hers.exists()


def test_a_run_that_lives_is_not_deleted():
    begins = made(None)
    with pytest.raises(shardnb.ShardnbError, match="is starting: stop it first"): begins.delete()
    child = subprocess.Popen(["sleep", "60"])
    try:
        lost = made("lost")
        write_json(lost.rundir.state_path, {"host": "x", "heartbeat": 0, "supervisor": None, "state": "running", "ranks": {"0": proc_id(child.pid)}})
        with pytest.raises(shardnb.ShardnbError, match=f"rank 0 still lives: end process {child.pid} first"): lost.delete()
    finally:
        child.kill()
        child.wait()
    assert lost.delete()
    source = made("stopped")
    made(None, resume_from=str(source.dir / "checkpoints" / "checkpoint-3"))
    with pytest.raises(shardnb.ShardnbError, match="goes on from a checkpoint of run"): source.delete()
    assert begins.dir.exists() and source.dir.exists()


def test_what_was_deleted_says_so():
    run = made()
    held = shardnb.attach(run.id)
    run.delete()
    for ask in (lambda: held.state, held.stop, held.delete, lambda: held.ended):
        with pytest.raises(shardnb.ShardnbError, match="was deleted"): ask()


@pytest.mark.skipif(os.getuid() == 0, reason="root may remove anything")
def test_a_folder_that_cannot_be_removed_is_named(home):
    run = made()
    (home / "runs").chmod(0o500)
    try:
        with pytest.raises(shardnb.ShardnbError, match="can't be deleted: Permission denied"): run.delete()
    finally: (home / "runs").chmod(0o700)
    assert run.dir.exists()


def test_the_command_asks(capsys, monkeypatch):
    a, b = made(), made("failed")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert main(["delete", a.id, b.id]) == 1 and "nothing is deleted" in capsys.readouterr().out and a.dir.exists()
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["delete", a.id]) == 2 and "--yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["delete", a.id[:-1], a.id]) == 0
    assert not a.dir.exists() and b.dir.exists()
    live = made(None)
    assert main(["delete", "--yes", b.id, live.id]) == 2 and "stop it first" in capsys.readouterr().err and b.dir.exists(), "all or none"
    assert main(["delete", "--yes", b.id]) == 0 and list(shardnb.runs().id) == [live.id]


def test_two_hundred_runs_stay_quick_and_bounded():
    for i in range(210): made(("done", "failed", "stopped")[i % 3], step=i).rundir.reserve_path.unlink()
    began, before = time.process_time(), len(_instances)
    t = RunTable().build()
    t.refresh()
    first, widgets = time.process_time() - began, len(_instances) - before
    assert t.total == 210 and len(t.list.children) == 10 and "1 to 10 of 210" in t.where.value and t.newer.disabled
    began = time.process_time()
    for _ in range(10): t.refresh()
    look = (time.process_time() - began) / 10
    for _ in range(20): t.older.click()
    assert "201 to 210 of 210" in t.where.value and t.older.disabled and len(_instances) - before == widgets
    bundle = t._bundle()
    assert "20 of 210 runs" in bundle["text/html"] and len(json.dumps(bundle)) < 50_000
    t.close()
    assert len(_instances) == before
    print(f"first page {first * 1000:.0f} ms of CPU, {widgets} widgets, a look {look * 1000:.1f} ms of CPU")
    assert first < 2 and look < .1


def test_buttons_belong_to_runs():
    old = made(step=1)
    t = RunTable().build()
    t.refresh()
    line = t._lines[old.id]
    new = made(None)
    write_json(new.rundir.state_path, {"host": "x", "heartbeat": time.time(), "supervisor": None, "state": "running", "ranks": {}})
    t.refresh()
    assert t._lines[old.id] is line and list(t.list.children) == [t._lines[new.id].box, line.box]
    line.buttons["delete"].click()
    assert t._asked == ("delete", old.id) and t.list.children[2] is t.ask and "for good" in t.question.value
    made(None)
    t.refresh()
    assert t.list.children[3] is t.ask, "the question stays with its run"
    t._lines[new.id].buttons["stop"].click()
    assert new.rundir.stop_requested() and t._lines[new.id].buttons["stop"].description == "Kill"
    t.yes.click()
    until(lambda: old.id not in t._lines)
    assert not old.dir.exists() and "is deleted" in t.said.value
    t.close()


def running(run):
    write_json(run.rundir.state_path, {"host": "x", "heartbeat": time.time(), "supervisor": None, "state": "running", "ranks": {}})
    return run


def table():
    t = RunTable().build()
    t.refresh()
    return t


def test_a_double_click_on_stop_kills_nothing(monkeypatch):
    killed, run = [], running(made(None))
    monkeypatch.setattr(Run, "kill", lambda self: killed.append(threading.current_thread()))
    t = table()
    stop = t._lines[run.id].buttons["stop"]
    stop.click()
    stop.click()
    assert run.rundir.stop_requested()["how"] == "graceful" and not killed and t.ask in t.list.children and "by force" in t.question.value and t.yes.description == "Kill it"
    t.no.click()
    assert t.ask not in t.list.children and not killed
    stop.click()
    t.yes.click()
    assert until(lambda: killed)[0] is not threading.current_thread()
    stop.click()
    write_json(run.rundir.exit_path, {"state": "stopped", "error": None, "summary": {}})
    t.refresh()
    assert t.ask not in t.list.children, "nobody is asked about a run that has ended meanwhile"
    t.close()


def test_resume_pressed_twice_starts_one_run(monkeypatch):
    old, new, asked, go = made("stopped"), made("done"), [], threading.Event()
    monkeypatch.setattr(Run, "resume", lambda self: asked.append(self.id) or (go.wait(10) and new))
    t = table()
    for _ in range(2): t._lines[old.id].buttons["resume"].click()
    go.set()
    until(lambda: t.outlet.showing == new.id)
    assert asked == [old.id]
    t.close()


def test_a_table_shown_again_moves(monkeypatch):
    from shardnb.ui import runs as R
    made()
    shown = []
    monkeypatch.setattr(R, "front", lambda: "live")
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw, display_id=None: SimpleNamespace(update=lambda b, raw: shown.append(b)))
    t, before = RunTable(every=.01), len(_instances)
    t._ipython_display_()
    n = len(_instances)
    t._ipython_display_()
    assert len(_instances) == n and any("widget" not in str([*b]) and "done" in b["text/html"] for b in shown)
    until(lambda: sum(x.name == "shardnb runs" for x in threading.enumerate()) == 1)
    t.close()
    until(lambda: not any(x.name == "shardnb runs" for x in threading.enumerate()))
    assert len(_instances) == before


def test_a_button_of_a_run_that_is_gone_says_so():
    run = running(made(None))
    t = table()
    line = t._lines[run.id]
    shutil.rmtree(run.dir)
    for n in ("stop", "delete"):
        line.buttons[n].click()
        assert run.id in t.said.value
    t.close()


def test_names_and_errors_are_escaped():
    run = made(model="<script>x</script>")
    t = RunTable().build()
    t.refresh()
    pages = [t._lines[run.id].text.value, t._bundle()["text/html"]]
    t._show(run.id, "show")
    pages.append(t.outlet.box.children[0].value)
    t.close()
    assert all("<script>" not in p for p in pages) and all("&lt;script&gt;" in p for p in pages[:2])


def test_a_run_that_cannot_be_resumed_says_why_below_the_table():
    run = made("stopped")
    t = RunTable().build()
    t.refresh()
    t._lines[run.id].buttons["resume"].click()
    until(lambda: "no complete checkpoint" in t.said.value)
    t.close()
