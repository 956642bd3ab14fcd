"The pictures: one order of categories everywhere, nothing global, same input same picture."
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from shardnb.plan.memory import CATEGORIES
from shardnb.ui import charts as C
from shardnb.ui import figures as F

M = 2**20


def a_run(ranks=2, steps=5):
    m = pd.DataFrame(dict(step=range(1, steps + 1), loss=[3.0 / s for s in range(1, steps + 1)], tokens_per_s=500.0, step_s=2.0, forward_s=.7, backward_s=.9))
    rows = [(steps, r, "device", c, b * M, moment) for r in range(ranks) for moment in C.MOMENTS for c, b in dict(params=50, grads=50, optimizer=100).items()]
    mem = pd.DataFrame(rows, columns=["step", "rank", "place", "category", "bytes", "moment"])
    recipe = SimpleNamespace(model="<b>tiny</b>", strategy="zero3", nproc=ranks, tuning="full", precision="fp32", max_steps=steps)
    return SimpleNamespace(id="20261129-150405-zero3-ab12", state="running", recipe=recipe, metrics=m, memory=mem, plan={}, error=None, shards=[], stalled=[], stall=None, events=lambda kind: [], evals=None, recent=lambda n=10: m.tail(n).to_dict("records"),
                           way=dict(total_steps=steps, first_step=None, phases=[], progress=None, peak=None),
                           rundir=SimpleNamespace(recipe_path=Path(__file__)))


def test_palette_is_the_order_of_the_categories():
    assert tuple(F.PALETTE) == tuple(CATEGORIES)
    assert set(F.MEANING) == set(CATEGORIES)


def test_bars_keep_the_order_whatever_order_was_measured():
    run = a_run()
    run.memory = run.memory.sample(frac=1, random_state=0)
    rows = C.memory_rows(run.memory)
    assert [r[2] for r in rows] == list(C.MOMENTS) * 2
    assert all(list(r[3]) == ["params", "grads", "optimizer"] for r in rows)


def test_drawing_is_the_same_from_any_thread_and_without_pyplot():
    one, out = F.png(C.run_figure(a_run())), []
    threads = [threading.Thread(target=lambda: out.append(F.png(C.run_figure(a_run())))) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert out == [one] * 3
    assert "matplotlib.pyplot" not in sys.modules


def test_measured_is_never_hatched():
    fig = F.new_figure()
    ax = fig.add_subplot()
    C.memory_bars(ax, C.memory_rows(a_run().memory))
    assert ax.patches and not any(p.get_hatch() for p in ax.patches)


def test_html_is_escaped():
    from shardnb.ui.card import header_html
    html = header_html(a_run())
    assert "<b>tiny</b>" not in html and "&lt;b&gt;tiny" in html


def test_words_behind_a_bar_stay_in_the_picture():
    "In a tile as in a wide figure, for the longest bar with the most to say"
    for width in (C.TILE, 9.6, 12):
        fig = F.new_figure(width, 3)
        ax = fig.add_axes([.26, .3, .68, .6])
        C.memory_bars(ax, [(r, "device", "peak", dict(params=40 * 2**20, context=181 * 2**20), None) for r in (0, 1)])
        fig.canvas.draw()
        edge = fig.bbox.width
        assert max(t.get_window_extent().x1 for t in ax.texts) <= edge, width
