"A plan as people see it: the figure, `%shardplan`, `shardnb plan`, the picker that never blocks, and the prediction beside the run."
import json
import sys
import threading
import time
from types import SimpleNamespace

import pandas as pd
import pytest
from waiting import within

from shardnb.plan.advise import Plan
from shardnb.plan.memory import MemoryBreakdown
from shardnb.plan.problem import PlanError, Problem, RecipeError, ShardnbError
from shardnb.plan.recipe import Recipe
from shardnb.ui import charts as C
from shardnb.ui import figures as F
from shardnb.ui.picker import Picker

G = 2**30


def breakdown(host=0, band=(G // 4, G), **parts):
    return MemoryBreakdown({c: n * G for c, n in parts.items()}, dict(optimizer=host * G) if host else {}, peak_at="backward", band=band)


def a_plan(fits=("tight", "yes", "no"), limit=24, band=(G // 4, G), **changes):
    "Three strategies; the second is recommended"
    made = {"zero3": breakdown(params=4, grads=4, optimizer=12, activations=2, band=band), "zero3+optim-cpu": breakdown(params=4, activations=2, host=16, band=band),
            "ddp": breakdown(params=8, grads=8, optimizer=32, activations=2, band=band)}
    rows = [dict(strategy=n, label=n, nproc=2, fits=f, why="because", peak_bytes=b.peak, worst_bytes=b.worst, host_bytes=b.host_peak, limit_bytes=limit * G, comm_bytes_per_step=G,
                 relative_step_time=1.0, largest=b.largest, suggestion=None) for (n, b), f in zip(made.items(), fits)]
    best = None if "yes" not in fits else "zero3+optim-cpu"
    return Plan(**dict(title="<b>two</b> GPUs", best=best, why=f"{best} fits", rows=rows, breakdowns=made, best_label=best, nproc=2) | changes)


def lines(ax):
    "(x, from, to) of the pieces of the capacity line"
    return [(s[0][0], s[0][1], s[1][1]) for c in ax.collections if c.get_label() == "capacity" for s in c.get_segments()]


def words(fig):
    return [t.get_text() for ax in fig.axes for t in ax.texts]


def test_figure_has_a_hatched_bar_for_each_part_and_one_capacity_line():
    p = a_plan()
    fig = p.figure()
    ax = fig.axes[0]
    bars = [b for b in ax.patches if b.get_hatch()]
    assert len(bars) == sum(len(b.device) for b in p.breakdowns.values()) == 10
    assert len({b.get_y() for b in bars}) == len(p) == 3
    assert [x for x, *_ in lines(ax)] == [24 * G] * 3
    assert [(a, b) for _, a, b in lines(ax)] == [(-.5, .5), (.5, 1.5), (1.5, 2.5)]   # the pieces join
    assert "matplotlib.pyplot" not in sys.modules


def test_figure_says_the_verdict_the_host_and_the_recommendation_in_words():
    said = words(a_plan().figure())
    assert [w for w in said if w.startswith("▸")] == ["▸ zero3+optim-cpu"]
    assert "22.0 to 23.0 GiB · tight" in said and "6.00 to 7.00 GiB + 16.0 GiB host · fits" in said and "50.0 to 51.0 GiB · doesn't fit" in said


def test_whiskers_reach_the_worst_case():
    ends = sorted({round(max(x.get_xdata()) / G) for x in a_plan().figure().axes[0].lines})
    assert ends == [7, 23, 51]


def test_capacity_far_away_is_an_arrow_and_one_that_differs_jumps():
    far = a_plan(limit=500).figure()
    assert not lines(far.axes[0]) and any("500 GiB →" in w for w in words(far))
    p = a_plan()
    p.rows[2]["limit_bytes"] = 48 * G
    assert [x / G for x, *_ in lines(p.figure().axes[0])] == [24, 24, 48]
    assert any("of 48.0 GiB" in w for w in words(p.figure()))


def test_without_a_gpu_the_host_is_in_the_bar():
    fig = a_plan(band=(0, 0)).figure()
    assert "22.0 GiB · fits" in words(fig) and not any("host" in w for w in words(fig)) and not fig.axes[0].lines


def test_breakdown_has_a_bar_for_each_phase():
    phases = dict(load=dict(params=G), forward=dict(params=G, activations=G), backward=dict(params=G, grads=G, activations=G), step=dict(params=G, grads=G))
    b = MemoryBreakdown(phases["backward"], peak_at="backward", phases=phases, band=(0, G))
    said = words(b.figure(limit=6 * G))
    assert [w.split()[0] for w in said if w.split()[0] in phases] == list(phases) and "backward (the peak)" in said
    assert "3.00 to 4.00 GiB" in said
    assert not any(p.get_hatch() for p in MemoryBreakdown(phases["step"], source="measured").figure().axes[0].patches)


def test_page_is_static_and_escaped():
    page = a_plan()._repr_html_()
    assert "<b>two</b>" not in page and "&lt;b&gt;two" in page
    assert "data:image/png" in page and "widget" not in page and page.count("<tr") == 4


def run_with(predicted, steps=(1, 2, 3)):
    rows = [(s, r, "device", c, b, "peak") for s in steps for r in (0, 1) for c, b in dict(params=6 * G, total=(20 if s < 3 else 10) * G + r * G).items()]
    return SimpleNamespace(memory=pd.DataFrame(rows, columns=["step", "rank", "place", "category", "bytes", "moment"]), predicted=predicted)


def test_error_counts_from_the_third_step():
    run = run_with(breakdown(params=6, activations=4))
    assert C.prediction_text(run) == "predicted 10.0 GiB at backward, measured 11.0 GiB: off by -9.1 %"
    assert C.prediction_text(run_with(breakdown(params=6), steps=(1, 2))) == "predicted 6.00 GiB at backward"
    assert C.prediction_text(run_with(None)) == ""


@pytest.mark.parametrize("longest,ran,text", [
    (256, 128, "predicted 10.0 GiB at backward with rows of 256 tokens, 6.00 GiB with rows of 128 as they ran, measured 11.0 GiB: off by -45.5 %"),
    (None, 256, "predicted at most 10.0 GiB at backward, measured 11.0 GiB: off by -9.1 %"), (256, None, "predicted 10.0 GiB at backward, measured 11.0 GiB: off by -9.1 %")])
def test_a_run_with_shorter_rows_is_compared_with_what_was_predicted_for_these(longest, ran, text):
    run = run_with(breakdown(params=6, activations=4))
    run.plan = {"predicted_lengths": {"longest": longest, "by_length": [[64, 4 * G], [192, 8 * G], [256, 10 * G]]}}
    run.memory.attrs["length"] = ran   # of the highest peak after the second step: `run.digest` looks for it
    assert C.prediction_text(run) == text


def test_predicted_bars_are_hatched_beside_measured_ones():
    rows = C.beside(C.memory_rows(run_with(None).memory), breakdown(params=6, activations=4))
    assert [r[2] for r in rows] == ["peak", "predicted"] * 2
    fig = F.new_figure()
    C.memory_bars(fig.add_subplot(), rows)
    hatched = [p for p in fig.axes[0].patches if p.get_hatch()]
    assert len(hatched) == 4 and {p.get_width() / G for p in hatched} == {6, 4}


def test_a_run_tells_what_was_predicted(tmp_path, monkeypatch):
    from shardnb.run.handle import Run
    from shardnb.run.rundir import RunDir
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    b = breakdown(params=6, host=2)
    recipe = Recipe(model="tiny", dataset="demo")
    assert Run(RunDir.create(recipe, plan={"predicted": json.loads(json.dumps(b.to_json()))})).predicted == b
    assert Run(RunDir.create(recipe, plan={"predicted": None})).predicted is None


@pytest.fixture
def answers(monkeypatch):
    "What the planner would say, without one: called with (recipe, machine)"
    import shardnb.run.forecast as forecast
    asked = []

    def answer(plan):
        monkeypatch.setattr(forecast, "plan", lambda recipe, machine=None: asked.append((recipe, machine)) or plan)
        return asked
    return answer


@pytest.fixture
def command(capsys):
    from shardnb.ui.cli import main

    def run(line):
        code = main(line.split())
        return (code, *capsys.readouterr())
    return run


def test_command_prints_table_recommendation_and_the_line_to_run(answers, command):
    asked = answers(a_plan(changes={"activation_checkpointing": False}))
    code, out, err = command("plan --model tiny --dataset demo --machine 2xRTX4090")
    assert (code, err) == (0, "") and asked[0][1].name == "2xRTX4090-24GB"
    assert "zero3+optim-cpu fits" in out and "▸" in out
    assert "to train so: shardnb train --model tiny --dataset demo --strategy zero3+optim-cpu --no-activation-checkpointing" in out


def test_command_as_json_is_the_plan(answers, command):
    answers(a_plan())
    code, out, _ = command("plan --model tiny --json")
    assert code == 0 and repr(Plan.from_json(json.loads(out))) == repr(a_plan())


def test_exit_code_is_1_when_nothing_fits_and_the_help_says_so(answers, command):
    answers(a_plan(fits=("no", "no", "no")))
    assert command("plan --model tiny")[0] == 1
    assert "1 when none does" in __import__("shardnb.ui.cli").ui.cli.command_parser("plan").format_help()


def test_all_problems_of_recipe_and_machine_are_one_error(answers, command):
    answers(a_plan())
    code, out, err = command("plan --model tiny --precision bf17 --machine 4xA1000-80GB")
    assert (code, out) == (2, "") and "2 problems" in err and "bf16" in err and "A100-80GB" in err


def test_magic_returns_the_plan_and_shows_it_once(answers, capsys):
    from IPython.core.interactiveshell import InteractiveShell
    from shardnb.ui.magics import load_ipython_extension, unload_ipython_extension
    answers(a_plan())
    ip = InteractiveShell.instance()
    load_ipython_extension(ip)
    try:
        assert ip.run_cell("%shardplan --model tiny --machine 2xRTX4090").result.best == "zero3+optim-cpu"
        assert capsys.readouterr().out.count("▸") == 1
        assert ip.run_cell("%shardplan --model tiny --machine 2xRTX4091").error_in_exec.problems[0].nearest == "2xRTX4090-24GB"
    finally:
        unload_ipython_extension(ip)
        InteractiveShell.clear_instance()


def test_real_planner_from_magic_to_table():
    from shardnb.ui.magics import ShardMagics
    before = "torch" in sys.modules # another test may have loaded it
    p = ShardMagics(None).shardplan("--model tiny --nproc 2 --machine 2xT4")
    assert isinstance(p, Plan) and p.best and p["ddp"].peak > p["zero3"].device["params"]
    assert ("torch" in sys.modules) == before


until = within(10, .01)


def answers_to(recipe, plan=None):
    "What `forecast` gives when nothing is wrong"
    return [("now", "<b>now</b>"), ("plan", plan or a_plan()), ("settings", {"recipe": recipe.to_yaml(), "settings": {}, "notes": []})]


class Slow:
    "Answers when it is told to"
    def __init__(self): self.asked, self.go = [], threading.Event()
    def __call__(self, recipe, machine):
        self.asked.append((recipe, machine))
        assert self.go.wait(10)
        return answers_to(recipe)


def start(**kw): return Picker(Recipe(model="tiny", dataset="demo", strategy="zero3", nproc=2), **kw)


def test_picker_waits_for_more_changes_and_asks_once():
    ask = Slow()
    ask.go.set()
    p = start(ask=ask, pause=1)   # s; a busy machine takes long for the four changes
    for n in "1234": p.fields["micro_batch"].value = n
    assert "predicting" in p.state.value and not ask.asked
    assert until(lambda: p.settings.value)
    assert [r.micro_batch for r, _ in ask.asked] == [4]
    assert p.now.value == "<b>now</b>" and p.bars.value.count('role="img"') == 3 and "Recommended" in p.advice.value and "▸" in p.table.value and "predicting" not in p.state.value


def test_picker_drops_the_answer_to_an_older_question():
    ask = Slow()
    p = start(ask=ask, pause=0.01)
    p.fields["micro_batch"].value = "1"
    assert until(lambda: ask.asked)                       # under way, and the planner is slow
    for n in "23": p.fields["micro_batch"].value = n      # the form answers all the while
    assert "--micro-batch 3" in p.line.value and not p.launch.disabled
    time.sleep(.1)
    ask.go.set()
    assert until(lambda: p.plan is not None)
    assert [r.micro_batch for r, _ in ask.asked] == [1, 3]   # the one between was never asked
    assert "predicting" not in p.state.value


def test_picker_shows_what_cannot_be_in_place():
    wrong = RecipeError([Problem("nproc", 4, "4 ranks need as many GPUs; there are 2")])
    p = start(ask=lambda r, m: [("problem", wrong), ("problem", wrong)])
    p.read(background=False)
    assert p.problems.value.count("4 ranks") == 1 and "Traceback" not in p.problems.value and p.launch.disabled and not p.bars.value and not p.now.value
    p.ask = lambda r, m: answers_to(r)
    p.read(background=False)
    assert not p.problems.value and not p.launch.disabled and p.bars.value


def test_picker_shows_the_chosen_strategy_before_the_others():
    go = threading.Event()

    def ask(recipe, machine):
        for what, value in answers_to(recipe):
            yield what, value
            assert go.wait(10)
    p = start(ask=ask, pause=.01)
    p.fields["max_length"].value = "64"
    assert until(lambda: p.now.value) and "comparing" in p.state.value and not p.bars.value
    go.set()
    assert until(lambda: p.settings.value) and p.bars.value


def test_picker_prepares_neighbours_only_as_long_as_nobody_asks():
    traced = []

    def ask(recipe, machine):
        yield from answers_to(recipe)
        for n in range(1000):
            traced.append((recipe.max_length, n))
            yield "ahead", n
            time.sleep(.01)
    p = start(ask=ask, pause=.01)
    p.fields["max_length"].value = "64"
    assert until(lambda: len(traced) > 2) and not p.state.value and not p.launch.disabled
    p.fields["max_length"].value = "128"
    assert until(lambda: (128, 2) in traced)
    assert len([n for at, n in traced if at == 64]) < 100
    p.close()
    with p._turn: before = len(traced)   # what was under way is over
    time.sleep(.1)
    assert len(traced) == before, "a closed form asks for nothing"


def test_neighbours_compute_in_another_way():
    from shardnb.ui.picker import neighbours
    r = Recipe(model="tiny", dataset="demo", micro_batch=4, tuning="lora", lora_r=8)
    assert [(n.micro_batch, n.lora_r) for n in neighbours(r)] == [(1, 8), (4, 4), (4, 16)]
    assert [n.micro_batch for n in neighbours(Recipe(model="tiny", dataset="demo"))] == [2]


def test_an_unexpected_error_is_said_and_not_swallowed(monkeypatch):
    import shardnb.run.forecast as forecast
    import shardnb.run.planner as planner
    from shardnb.ui.picker import forecast as ask

    def broken(*a, **kw): raise ZeroDivisionError("oh")
    monkeypatch.setattr(forecast, "plan", broken)
    monkeypatch.setattr(planner, "plan_run", broken)
    monkeypatch.setattr(forecast, "predict", broken)
    found = list(ask(Recipe(model="tiny", strategy="ddp", nproc=1), None))
    assert [w for w, _ in found] == ["problem"] * 3 and all(isinstance(e, ShardnbError) and "ZeroDivisionError: oh" in str(e) for _, e in found)


def test_picker_plans_for_another_machine_and_launches_only_here():
    seen = []
    p = start(ask=lambda r, m: seen.append(m.name) or answers_to(r), pause=0)
    p.machine.value = "8xH100-80GB"
    assert until(lambda: seen) and until(lambda: p.bars.value)
    assert seen == ["8xH100-80GB"] and p.launch.disabled and "this machine" in p.note.value
    p.machine.value = "this machine"
    assert until(lambda: len(seen) == 2 and not p.launch.disabled)
    assert Picker(p.base, "3xA100-40GB").machine.value == "3xA100-40GB"


def test_picker_offers_auto():
    p = start(ask=lambda r, m: answers_to(r))
    p.fields["strategy"].value = "auto"
    p.read(background=False)
    assert p.recipe.strategy == "auto" and not p.problems.value and "recommended" in p.about.value


class Exactly:
    "Stands for the exact prediction: says how far it is, then waits"
    def __init__(self, answer): self.answer, self.asked, self.go = answer, [], threading.Event()
    def __call__(self, recipe, machine=None, exact=False, on_progress=None):
        self.asked.append((recipe, exact))
        on_progress(2, 4, "first step")
        assert self.go.wait(10)
        if isinstance(self.answer, Exception): raise self.answer
        return self.answer


def planned_picker(monkeypatch, answer, **kw):
    from shardnb.run import forecast
    exactly, ask = Exactly(answer), Slow()
    monkeypatch.setattr(forecast, "predict", exactly)
    ask.go.set()
    p = start(ask=ask, pause=0, **kw)
    assert p.exact.disabled
    p.read(background=False)
    assert not p.exact.disabled
    return p, exactly


def test_picker_works_out_exactly_with_progress(monkeypatch):
    p, exactly = planned_picker(monkeypatch, breakdown(params=10, activations=10))
    p.exact.click()
    assert until(lambda: p.progress.value == 2) and (p.progress.max, p.progress.description, p.progress.layout.display) == (4, "first step", None) and p.exact.disabled
    exactly.go.set()
    assert until(lambda: p.exactly.value) and p.progress.layout.display == "none"
    assert [(r.strategy, e) for r, e in exactly.asked] == [("zero3", True)]
    assert "zero3 by the engine&#x27;s own code: 20.0 GiB" in p.exactly.value and "+10.0 %" in p.exactly.value
    assert p.plan["zero3, exact"].peak == 20 * G
    p.fields["max_length"].value = "64"
    assert until(lambda: p.exactly.value == "")


def test_an_exact_answer_to_an_older_form_is_dropped_and_an_error_is_said(monkeypatch):
    p, exactly = planned_picker(monkeypatch, PlanError("no such kernel"))
    p.exact.click()
    assert until(lambda: exactly.asked)
    p.fields["max_length"].value = "64"
    exactly.go.set()
    assert until(lambda: p.progress.layout.display == "none") and p.exactly.value == ""
    assert until(lambda: not p.exact.disabled)
    p.exact.click()
    assert until(lambda: "no such kernel" in p.exactly.value) and not p.exact.disabled


def test_the_line_of_the_open_form_is_written(monkeypatch):
    from shardnb.ui import picker
    p = start(ask=lambda r, m: answers_to(r))
    monkeypatch.setattr(Picker, "newest", p)
    p.cell = "another cell"
    p.fields["micro_batch"].value = "4"
    line, form = picker.written()
    assert form is None and line.startswith("%shardtrain ") and "--micro-batch 4" in line
    p.fields["micro_batch"].value = "many"
    with pytest.raises(RecipeError, match="many"): picker.written()


def test_closing_a_form_leaves_no_widget():
    from ipywidgets.widgets.widget import _instances
    before = len(_instances)
    p = start(ask=lambda r, m: answers_to(r))
    p.read(background=False)
    assert len(_instances) > before + 30
    p.close()
    assert len(_instances) == before


def test_launch_is_open_when_the_run_has_ended_whoever_shows_it(monkeypatch, tmp_path):
    import longrun

    from shardnb.run.handle import Run
    from shardnb.ui.outlet import Outlet
    longrun.undrawn(monkeypatch)
    run, starts, go = Run(longrun.make(tmp_path, 5, 1, params=2)), [], threading.Event()
    monkeypatch.setattr("shardnb.run.start.train", lambda recipe: starts.append(recipe) or (go.wait(10) and run))
    p = start(ask=lambda r, m: answers_to(r))
    p.read(background=False)
    p.launch.click()
    p.launch.click()
    p.read(background=False)
    assert p.launch.disabled and "launching" in p.note.value
    go.set()
    assert until(lambda: p.outlet.panel and p.outlet.panel._thread and not p.note.value)
    assert len(starts) == 1 and p.run is run and p.launch.disabled
    other = Outlet().open(run)                                        # shown elsewhere: the form keeps the picture
    assert "data:image/png" in p.outlet.box.children[0].value and p.launch.disabled
    longrun.ended(run.rundir)
    assert until(lambda: not p.launch.disabled)
    other.close()
    p.close()


def test_a_form_outlives_its_run(tmp_path):
    import shutil

    import longrun

    from shardnb.run.handle import Run
    p = start(ask=lambda r, m: answers_to(r))
    p.run = Run(longrun.make(tmp_path, 5, 1, params=2))
    p.read(background=False)
    assert p.launch.disabled
    shutil.rmtree(p.run.dir)                                          # deleted, by a command or another notebook
    p.read(background=False)
    assert not p.launch.disabled and p.run is None and not p.problems.value
    p.close()
