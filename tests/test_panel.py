"""The live panel: its bounds, its parts, its buttons, one panel of a run and of a cell. Runs are folders that `longrun` writes; only the last tests start a kernel."""
import gc
import html
import json
import random
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import longrun
import pandas as pd
import pytest
from waiting import within

from shardnb.run.event import EventWriter
from shardnb.run.handle import Run
from shardnb.run.rundir import RunDir, read_json, write_json
from shardnb.ui import charts as C
from shardnb.ui import front as F
from shardnb.ui import panel as P
from shardnb.ui.card import header_html, log_html, notes_html, settings_html, shards_html, stall_html, summary, text_line
from shardnb.ui.figures import png
from shardnb.ui.front import close_all
from shardnb.ui.outlet import Outlet


@pytest.fixture(scope="module", params=[1, 8], ids=["1 rank", "8 ranks"])
def run(request, tmp_path_factory): return Run(longrun.make(tmp_path_factory.mktemp("home"), 400, request.param))


@pytest.fixture
def small(tmp_path): return Run(longrun.make(tmp_path, 30, 2, params=6))


@pytest.fixture
def panel(small):
    made = []
    def make(r=small):
        p = P.Panel(r).build()
        p._refresh(force=True)
        p.handle = SimpleNamespace(update=lambda bundle, raw: made.append(bundle))
        return p
    make.shown = made
    return make


until = within(10, .02)
VIEW = "application/vnd.jupyter.widget-view+json"


# --- what is kept of a run, and what is read again ---

def test_the_digest_says_what_the_files_say(run):
    "Every table from the digest is the one from all events"
    events, memory = run.events("step", rank=0), run.memory
    assert run.told == {k: len(run.events(k)) for k in run.told}
    assert run.metrics.loss.tolist() == [e["loss"] for e in events] and run.metrics.time.tolist() == [e["t"] for e in events]
    assert [r["tokens_per_s"] for r in run.recent(7)] == [e["tokens_per_s"] for e in events[-7:]]
    assert C.memory_rows(run.newest) == C.memory_rows(memory)
    totals = memory.query("moment == 'peak' and category == 'total'")
    pd.testing.assert_frame_equal(run.history.sort_values(["rank", "step"], ignore_index=True), totals[["step", "rank", "bytes"]].sort_values(["rank", "step"], ignore_index=True))
    assert (run.way["peak"], run.way["settled"]) == (totals.bytes.max(), totals.query("step > 2").bytes.max())
    assert run.timeline().equals(run.timeline(max(e["step"] for e in run.events("timeline", 0))))
    assert run.evals.loss.tolist() == [e["loss"] for e in run.events("eval")] and len(run.evals) == 20
    assert len(run.events()) == sum(run.told.values())


def test_events_that_come_are_added_not_read_again(small):
    assert small.told["step"] == 30
    offsets = {r: reader.offset for r, reader in small._readers.items()}
    w = EventWriter(small.rundir.event_path(0), 0)
    w.write("step", step=31, loss=1.)
    w.write("step", step=30, loss=9.)   # a step told again
    assert small.metrics.loss.tolist()[-2:] == [9., 1.] and small.metrics.step.is_monotonic_increasing
    assert small._readers[1].offset == offsets[1] and small._readers[0].offset == small.rundir.event_path(0).stat().st_size > offsets[0]


# --- bounds ---

SHARE, UPDATE, SAVED, GROWTH = .05, 100e3, 1e6, 200e6   # of a core; bytes


def widgets(w):
    yield w
    for c in getattr(w, "children", ()): yield from widgets(c)


def sizes(panel):
    "The size of each value that is set from now on"
    sent = []
    for w in widgets(panel.widget):
        if hasattr(w, "value"): w.observe(lambda ch: sent.append(len(bytes(ch.new)) if isinstance(ch.new, (bytes, memoryview)) else len(str(ch.new))), "value")
    return sent


def test_a_tick_is_cheap_and_small(run):
    "A dozen ticks, each with news, cost what a twentieth of a core gives for the time they stand for; this machine may be busy, so time is this thread's own"
    p = P.Panel(run).build()
    p._refresh(force=True)
    sent, w, rng, last = sizes(p), run.rundir.event_path(0).open("a"), random.Random(1), run.recent(1)[-1]["step"]
    p._credit = 0
    gc.collect(), gc.freeze()   # what hundreds of tests before it have left is not the panel's to look through
    began = time.thread_time()
    for i in range(1, 13):
        w.write(json.dumps(longrun.step_event(last + i, 10_000, time.time(), .36, rng)) + "\n")
        w.flush()
        p._ticked -= .5   # as if half a second had passed
        p._refresh()
    cost = (time.thread_time() - began) / (12 * .5)
    gc.unfreeze()
    p.close()
    print(f"\n{len(run.rundir.ranks())} ranks: {100 * cost:.1f} % of a core, biggest update {max(sent) / 1e3:.0f} kB")
    assert cost < 2 * SHARE and max(sent) < UPDATE   # twice: the account may be overdrawn by a tile in so short a time


def test_64_ranks_are_bounded(tmp_path):
    run = Run(longrun.make(tmp_path, 6, 64, params=40))
    rows, names = C._bars_of(run)
    assert len({r[0] for r in rows}) == 3 and [n.split()[0] for n in names.values()] == ["least", "median", "most"]
    assert C.run_figure(run).get_figheight() < 9 and C.tile(run, "memory").get_figheight() < 7
    page = shards_html(run)
    assert "the first 8 of 64 ranks" in page and len(page) < 80e3 and page.count("<th") == 11
    assert len(json.dumps(P.static_bundle(run))) < SAVED


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_hundred_thousand_steps_in_a_kernel(tmp_path, ranks):
    "A real kernel attaches to a run that has done 100,000 steps and goes on: its share of a core, its growth, what it sends, what it leaves"
    import subprocess
    import sys

    import psutil
    from notebook_kernel import Kernel
    rundir = longrun.make(tmp_path, 100_000, ranks)
    kernel = Kernel(tmp_path)
    try:
        longrun.alive(rundir, world_size=ranks)
        kc, me = kernel.kc, psutil.Process(kernel.pid)
        kernel.run("import shardnb, pandas, numpy, ipywidgets, matplotlib.figure, matplotlib.backends.backend_agg")
        before = me.memory_info().rss
        kernel.run(f"r = shardnb.attach({rundir.id!r}, {str(tmp_path)!r})\np = r.panel()\np.show()", 240)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(rundir.path), str(ranks)])
        time.sleep(3)
        while True:
            try: kc.get_iopub_msg(timeout=.1)
            except Exception: break
        began, t, top, sent, html_t = me.cpu_times(), time.time(), 0, [], []
        while time.time() - t < 40:
            try: m = kc.get_iopub_msg(timeout=.2)
            except Exception: continue
            n = len(json.dumps(m["content"])) + sum(len(b) for b in m.get("buffers", ()))
            sent.append(n)
            if "training …" in json.dumps(m["content"], ensure_ascii=False): html_t.append(time.time())
            top = max(top, me.memory_info().rss)
        ended, wall = me.cpu_times(), time.time() - t
        writer.wait(60)
        longrun.ended(rundir)
        left = []
        end = time.time() + 60
        while time.time() < end and not left:
            try: m = kc.get_iopub_msg(timeout=.5)
            except Exception: continue
            if m["msg_type"] == "update_display_data": left.append(len(json.dumps(m["content"]["data"])))
        share = (ended.user + ended.system - began.user - began.system) / wall
        print(f"\n{ranks} ranks, 100,000 steps: {100 * share:.1f} % of a core, {(top - before) / 1e6:.0f} MB more, {len(sent)} messages of at most {max(sent) / 1e3:.0f} kB, a header each {wall / max(len(html_t), 1):.2f} s; {left[0] / 1e3:.0f} kB are left")
        assert share < SHARE and top - before < GROWTH and max(sent) < UPDATE and left[0] < SAVED
    finally: kernel.kill()


WRITER = """
import sys, time, random, json, pathlib
sys.path.insert(0, %r)
import longrun
rng, path, ranks, t, step = random.Random(1), pathlib.Path(sys.argv[1]), int(sys.argv[2]), time.time(), 100_000
files = [open(path / "events" / f"rank{r}.jsonl", "a") for r in range(ranks)]
while time.time() - t < 46:
    step, now = step + 1, time.time()
    print(json.dumps(longrun.step_event(step, 200_000, now, .36, rng)), file=files[0], flush=True)
    for r, f in enumerate(files) if step %% 30 == 0 else ():
        for e in longrun.memory_events(step, r, now, rng): print(json.dumps(e), file=f)
        f.flush()
    time.sleep(.1)
""" % str(Path(__file__).parent)


# --- parts ---

def test_every_part_is_there_and_labelled(panel):
    p = panel()
    assert [*p.tiles] == ["loss", "speed", "split", "history", "memory"] and all(bytes(w.value).startswith(b"\x89PNG") and w.tooltip is None for w in p.tiles.values())
    assert "Loss: " in p.words.value and "Peak memory of each rank: rank 0" in p.words.value
    assert [b.description for b in (p.stop, p.kill, p.snapshot)] == ["Stop", "Kill", "Snapshot timeline"] and all(b.tooltip for b in (p.stop, p.kill, p.snapshot))
    assert tuple(p.open) == tuple(w.description for w in p.open.values()) == ("One step of a rank", "Which rank owns which slice", "Effective settings", "Log of a rank")
    assert (p.log_rank.options, p.deep_rank.options) == ((0, 1, "supervisor"), (0, 1)) and p.log_rank.description == p.deep_rank.description == "rank"
    assert "CPU speed is not GPU speed" in p.header.value
    assert "rank 0 line 199" in p.folds["Log of a rank"].value
    assert all(w.layout.display == "none" for w in p.fold.children[1:])
    p.open["Log of a rank"].value, p.log_rank.value = True, 1
    assert p.fold.children[4].layout.display is None
    p._refresh()
    assert "rank 1 line 199" in p.folds["Log of a rank"].value
    p.open["One step of a rank"].value = True
    p._refresh()
    first = p.deep.value
    p.deep_rank.value = 1
    p._refresh()
    assert "rank 0 through one step" in first and "rank 1 through one step" in p.deep.value and "image/png" in first
    p.close()


def test_charts_say_what_was_measured_and_predicted(small):
    words = lambda fig: " ".join(t.get_text() for ax in fig.axes for t in [*ax.texts, *(ax.get_legend().get_texts() if ax.get_legend() else [])]) + " ".join(t.get_text() for t in fig.texts)
    assert "evaluation" in words(C.tile(small, "loss")) and "training" in words(C.tile(small, "loss"))
    assert {"predicted", "highest rank", "2 ranks"} <= {t.get_text() for t in C.tile(small, "history").axes[0].get_legend().get_texts()}
    assert "predicted 2.21 GiB at backward, measured" in words(C.tile(small, "memory"))
    hatched = [p for p in C.tile(small, "memory").axes[0].patches if p.get_hatch()]
    assert len(hatched) == 2 * 8   # categories of the prediction, once for each rank
    assert C.tile_text(small, "memory").startswith("Peak memory of each rank: rank 0 2.") and "backward" in C.tile_text(small, "split")


def test_the_two_peaks_are_told_apart(tmp_path):
    run = Run(longrun.make(tmp_path, 30, 1))
    assert "counts the first two" not in header_html(run)
    e = next(e for e in run.events("memory") if e["moment"] == "peak") | dict(step=2)
    with run.rundir.event_path(0).open("a") as f: f.write(json.dumps(e | {"bytes": e["bytes"] | {"total": 4 * 2**30}}) + "\n")
    assert summary(run)["peak"] == 4 * 2**30 and "(after the second step; 4.00 GiB counts the first two)" in header_html(run)


def test_a_loop_that_tells_no_tokens_has_no_speed(tmp_path):
    run = Run(RunDir.create("model: tiny\nnproc: 1\n", plan={"nproc": 1}, home=tmp_path))
    EventWriter(run.rundir.event_path(0), 0).write("step", step=1, loss=2., step_s=.1)
    longrun.alive(run.rundir)
    assert "nan" not in header_html(run) + text_line(run) + C.tile_text(run, "speed") and "100 ms" in header_html(run)
    said = [t.get_text() for t in C.tile(run, "speed").axes[0].texts]
    assert len(said) == 1 and "log(tokens=" in said[0]


def test_a_rank_that_falls_silent_is_told_although_no_event_comes(panel, small):
    p = panel()
    write_json(small.rundir.state_path, read_json(small.rundir.state_path) | {"stalled": [1]})
    p._refresh()
    assert "rank 1 has given no sign of life" in p.header.value
    p.close()


def test_settings_are_those_that_rank_0_read_back(tmp_path):
    run = Run(RunDir.create("model: tiny\nnproc: 2\n", plan={"nproc": 2, "settings": {"planned": 1}}, home=tmp_path))
    EventWriter(run.rundir.event_path(1), 1).write("effective", settings={"who": "rank 1"})
    assert "asked for" in settings_html(run) and "planned" in settings_html(run)
    EventWriter(run.rundir.event_path(0), 0).write("effective", settings={"who": "rank 0"})
    assert "read back in rank 0" in settings_html(run) and "rank 1" not in settings_html(run)


def test_text_from_outside_stays_text_and_short(small):
    bad = "<script>alert(1)</script>"
    w = EventWriter(small.rundir.event_path(1), 1)
    for i in range(40): w.write("warning", message=f"{bad}{i}", fix=bad)
    small.rundir.log_path(1).write_text(f"{bad}\n" + "x" * 100_000)
    pages = notes_html(small), log_html(small, 1)
    assert all("<script" not in p and html.escape(bad) in p for p in pages) and "and 20 more" in pages[0] and len(pages[1]) < 3000
    small.rundir.stall_path.write_text(json.dumps(dict(t=1., kind="busy", since=1., ranks=[63], message=bad, fix=bad, stacks={str(r): "y" * 50_000 for r in range(64)})))
    page = stall_html(small)
    assert page.index("rank 63") < page.index("rank 0<") and "and 56 more ranks" in page and len(page) < 60e3 and "<script" not in page


# --- buttons ---

def test_stop_is_a_file_and_kill_asks_once_more(panel, monkeypatch):
    p = panel()
    killed = []
    monkeypatch.setattr(Run, "kill", lambda self: killed.append(threading.current_thread().name))
    p.stop.click()
    assert p.run.rundir.stop_requested()["how"] == "graceful" and p.stop.disabled and "Stop asked for" in p.said.value
    p.kill.click()
    assert p.kill.description == "Really kill?" and not killed
    p._sure -= 7
    p._refresh()
    assert p.kill.description == "Kill"   # nobody pressed again
    p.kill.click()
    p.kill.click()
    assert not killed and p.kill.description == "Really kill?"   # two clicks in one are no answer
    p._sure -= 1
    p.kill.click()
    assert until(lambda: killed)[0] != threading.current_thread().name and p.kill.disabled   # not in the handler
    p.close()


def test_snapshot_opens_the_fold_and_says_when_it_is_there(panel):
    p = panel()
    p.snapshot.click()
    assert p.run.rundir.snapshot_path.exists() and p.snapshot.disabled and p.open["One step of a rank"].value
    with p.run.rundir.event_path(0).open("a") as f: f.write(json.dumps(longrun.timeline_event(31, 0, time.time())) + "\n")
    p._refresh()
    assert not p.snapshot.disabled and "newest step" in p.said.value
    longrun.ended(p.run.rundir)
    p.snapshot.click()
    assert "timeline is taken of a run that trains" in p.said.value
    p.close()


def checkpoint(run, step, world=2):
    from shardnb.run.checkpoint import whole_folder
    with whole_folder(run.rundir.checkpoints_path / f"checkpoint-{step}", step, strategy="zero3", world_size=world, run=run.id) as part:
        for n in ("optimizer.pt", "trainer_state.json", *(f"rng_state_{r}.pth" for r in range(world))): (part / n).write_text("{}")
    EventWriter(run.rundir.event_path(0), 0).write("checkpoint", path=f"checkpoints/checkpoint-{step}", step=step, complete=True)


def test_what_can_be_resumed(small):
    assert not P.resumable(small)                      # it lives
    checkpoint(small, 20)
    longrun.ended(small.rundir, "done")
    assert not P.resumable(small)
    longrun.ended(small.rundir, "stopped")
    assert P.resumable(small) and "resume()" in P.static_bundle(small)["text/html"]
    checkpoint(small, 60)
    assert not P.resumable(small)                      # no step is left to do


def shows(seen): return SimpleNamespace(update=lambda bundle, raw: seen.append(bundle))


def test_resume_shows_the_new_run_where_the_button_was_and_so_on(panel, small, tmp_path, monkeypatch):
    "The end leaves the static form and a button below; the button starts one run and gives its place to it, until that ends in the same way"
    from ipywidgets.widgets.widget import _instances
    longrun.undrawn(monkeypatch)
    before = len(_instances)
    p, below, kept, asked, go = panel(), [], [], [], threading.Event()
    checkpoint(small, 20)
    p.below = [shows(below), shows(kept)]
    longrun.ended(small.rundir, "stopped")
    assert p._refresh() == "stopped"
    p._finish()
    box = p.room.box
    resume = box.children[0].children[0]
    assert VIEW not in panel.shown[-1] and VIEW in below[-1] and box in p.widget.children and p.buttons not in p.widget.children
    assert resume.description == "Resume" and "step 20" in resume.tooltip
    new = Run(longrun.make(tmp_path / "more", 5, 1, params=2))
    monkeypatch.setattr(Run, "resume", lambda self: asked.append(self.id) or (go.wait(10) and new))
    resume.click()
    resume.click()
    go.set()
    until(lambda: p.room.panel and p.room.panel._thread, 30)
    assert asked == [small.id] and p.room.panel.run is new and box.children == (p.room.panel.widget,)
    checkpoint(new, 3, 1)
    longrun.ended(new.rundir, "stopped")
    until(lambda: len(box.children) == 2, 30)
    assert box.children[0].children[0].description == "Resume" and "step 3" in box.children[0].children[0].tooltip
    until(lambda: kept and new.id in kept[-1]["text/html"])   # the notebook keeps that run, too
    p.close()
    assert not P._PANELS and not P._OVER and len(_instances) == before


def test_resume_is_offered_wherever_a_stopped_run_is_shown(small, monkeypatch):
    from ipywidgets.widgets.widget import _instances
    shown = []
    monkeypatch.setattr(P, "front", lambda: "live")
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw, display_id=None: shown.append(bundle) or shows(shown))
    checkpoint(small, 20)
    longrun.ended(small.rundir, "stopped")
    P.show_panel(small)   # as attach(id).panel() and %shardruns ID do
    assert VIEW not in shown[0] and "data:image/png" in shown[0]["text/html"]
    box = _instances[shown[1][VIEW]["model_id"]]
    assert box.children[0].children[0].description == "Resume"
    longrun.undrawn(monkeypatch)
    o = Outlet().open(small)   # as a table of runs does
    assert o.box.children[0].children[0].description == "Resume" and "data:image/png" in o.box.children[1].value
    o.close()
    close_all(box)
    n = len(shown)
    P.show_panel(small, handle=shows(shown))
    assert "data:image/png" in shown[n]["text/html"], "in place of 'planning …'"
    close_all(_instances[shown[n + 1][VIEW]["model_id"]])


def test_the_oldest_panels_keep_their_card_alone(panel, small, monkeypatch):
    "Never blank: a page that was loaded anew since shows nothing but these widgets"
    longrun.undrawn(monkeypatch)
    monkeypatch.setattr(P, "_KEPT", 1)
    longrun.ended(small.rundir)
    made = [panel() for _ in range(2)]
    for p in made: p.below = [shows([]), shows([])]; p._finish()
    assert made[0].widget.children == (made[0].header,) and "done" in made[0].header.value and made[1].grid in made[1].widget.children
    for p in made: p.close()
    assert not P._OVER


def test_what_goes_wrong_behind_a_button_is_said(panel, monkeypatch):
    from shardnb.plan.problem import ShardnbError
    p = panel()
    def no(self): raise ShardnbError("rank <1> can't be ended")
    monkeypatch.setattr(Run, "kill", no)
    p.kill.click()
    p._sure -= 1
    p.kill.click()
    until(lambda: "rank &lt;1&gt; can&#x27;t be ended" in p.said.value)
    assert not p.kill.disabled and p.kill.description == "Kill"
    def full(*_): raise OSError(28, "No space left on device")
    for name, button in (("stop", p.stop), ("snapshot", p.snapshot)):
        monkeypatch.setattr(Run, name, full)
        p.said.value = ""
        button.click()
        assert "No space left" in p.said.value and not button.disabled
    p.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_button_works_again_whatever_went_wrong_behind_it():
    def broken(error): raise RuntimeError("nobody is there to hear it")
    busy, then = threading.Lock(), threading.Event()
    F.behind(lambda: 1 / 0, broken, busy)
    until(lambda: not busy.locked())
    assert F.behind(then.set, broken, busy) and then.wait(10)


def test_a_slow_look_is_followed_by_a_short_pause(panel, monkeypatch):
    "What is seen is never older than a second, though reading takes a part of it"
    p = panel()
    monkeypatch.setattr(P, "notes_html", lambda run: time.sleep(.6) or "")
    p._told = None
    p._refresh()
    assert p._pause <= P._EVERY - .6
    p.close()


# --- one panel of a run, one of a cell ---

@pytest.fixture
def cell(monkeypatch):
    "Outputs of cells: what is displayed, and `cell(name)` to execute one (again)"
    longrun.undrawn(monkeypatch)
    at, shown = ["a", 0], []
    monkeypatch.setattr("shardnb.ui.front._parent", lambda: {"metadata": {"cellId": at[0]}, "header": {"msg_id": str(at[1])}})
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw, display_id=None: shown.append(bundle) or shows(shown))
    def execute(name): at[:] = [name, at[1] + 1]
    execute.shown = shown
    return execute


def test_a_panel_shown_again_closes_its_predecessor(small, cell):
    from ipywidgets.widgets.widget import _instances
    before, shown = len(_instances), cell.shown
    one = P.Panel(small).show()
    assert VIEW in shown[0] and {"text/html", "image/png", "text/plain"} <= set(shown[0])   # the static form is there from the beginning
    cell("a")
    two = P.Panel(small).show()   # the same cell, executed anew
    assert one.widget is None and P._PANELS == {small.id: two}
    cell("b")
    n = len(shown)
    three = P.Panel(small).show()   # the same run in another cell: the first keeps its static form
    assert two.widget is None and VIEW not in shown[n] and "data:image/png" in shown[n]["text/html"] and P._PANELS[small.id] is three
    o = Outlet().open(small)   # and below a form
    assert three.widget is None and VIEW not in shown[-1] and o.panel.widget in o.box.children
    again = Outlet().open(small)   # below another one
    assert len(o.box.children) == 1 and "data:image/png" in o.box.children[0].value
    for x in (o, again): x.close()
    until(lambda: not any(p._thread.is_alive() for p in (one, two, three)))
    assert not P._PANELS and not F._OPEN and len(_instances) == before   # a widget that isn't closed stays for ever


def test_a_cell_that_was_a_table_closes_it(small, cell, monkeypatch):
    from shardnb.ui import runs as R
    monkeypatch.setattr(R, "front", lambda: "live")
    t = R.RunTable(small.dir.parent.parent)
    t._ipython_display_()
    p = P.Panel(small).show()
    assert t.widget is not None, "both in one execution of the cell"
    cell("a")
    q = P.Panel(small).show()
    assert t.widget is None and p.widget is None and t._end.is_set()
    q.close()


def test_a_panel_whose_run_is_deleted_says_so(panel):
    import shutil
    p = panel()
    shutil.rmtree(p.run.dir)
    p._thread = threading.Thread(target=p._watch)
    p._thread.start()
    p._thread.join(10)
    assert "This panel has stopped" in p.said.value and p.run.id in p.said.value
    p.close()


def test_a_cell_that_waits_has_no_buttons(small):
    p = P.Panel(small, blocked=True).build()
    p._refresh(force=True)
    assert p.buttons.children == (p.said,) and "interrupt the kernel" in p.said.value
    p.close()


def test_static_form_has_alternative_texts_and_no_widgets(small):
    longrun.ended(small.rundir)
    page = P.static_bundle(small)["text/html"]
    assert len(re.findall(r"<img alt=\"[^\"]{10,}\"", page)) == 6 and page.count("<img") == 6 and "widget" not in page and "flex-wrap" in page


def test_tiles_are_drawn_the_same_again(small):
    for n in C.TILES: assert png(C.tile(small, n, C.tile(small, "memory"))) == png(C.tile(small, n))
