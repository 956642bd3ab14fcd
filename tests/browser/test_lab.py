"""A person in JupyterLab: opens the first tutorial, picks a strategy, launches, sees the panel move, stops a second run, finds the static result.

Chromium drives a real server with a real kernel and real ranks; screenshots go to artifacts/, which git ignores.
"""
import json
import re

import pytest
from lab import ROOT, Page
from waiting import within

pytestmark = pytest.mark.browser
TUTORIAL = ROOT / "nbs" / "tutorials" / "01_first_sharded_finetune.ipynb"
until = within(60, .3)
STATES = "starting|running|stopping|stopped|done|failed|lost"


@pytest.fixture(scope="module")
def tutorial(lab):
    "A copy of the first tutorial without outputs, and the places of two of its cells"
    nb = json.loads(TUTORIAL.read_text())
    for c in nb["cells"]:
        if c["cell_type"] == "code": c["outputs"], c["execution_count"] = [], None
    (lab.root / TUTORIAL.name).write_text(json.dumps(nb))
    source = ["".join(c["source"]) for c in nb["cells"]]
    return dict(name=TUTORIAL.name, load=next(i for i, s in enumerate(source) if "%load_ext shardnb" in s), pick=next(i for i, s in enumerate(source) if s.startswith("%shardpick")))


@pytest.fixture
def notebook(browser, lab, tutorial):
    "The open tutorial; afterwards: nothing on the console, nothing asked of another host"
    p = Page(browser, lab, tutorial["name"])
    yield p
    p.shot("lab-last")   # what was on screen, also when the test failed
    p.page.close()
    assert not p.errors, p.errors[:5]
    assert not p.foreign, p.foreign[:5]


def run_cell(p, i):
    p.cell(i).locator(".jp-Editor, .jp-RenderedMarkdown").first.click()
    p.page.keyboard.press("Shift+Enter")


def field(output, name):
    "The input of the picker's field `name`"
    return output.locator(".widget-inline-hbox", has=output.page.locator(".widget-label", has_text=re.compile(f"^{name}$"))).locator("select, input").first


def state(output):
    "The word on the badge of the newest panel, '' before there is one; what is folded away doesn't count"
    return output.evaluate("(root, states) => [...root.querySelectorAll('span[style*=border-radius]')].filter(e => !e.closest('details') && states.includes(e.textContent)).at(-1)?.textContent || ''", STATES.split("|"))


def test_pick_launch_watch_stop(notebook, tutorial):
    p, page = notebook, notebook.page
    run_cell(p, tutorial["load"])
    run_cell(p, tutorial["pick"])
    out = p.cell(tutorial["pick"]).locator(".jp-OutputArea").first
    launch = out.locator("button", has_text="Launch")
    launch.wait_for(timeout=60_000)

    # the form: another strategy changes the line to copy, and what each strategy would hold is drawn
    field(out, "strategy").select_option("fsdp")
    until(lambda: "--strategy fsdp" in out.inner_text(), 20)
    until(lambda: out.locator("[role=img]").count() > 5, 60)
    until(lambda: launch.is_enabled(), 60)
    page.wait_for_timeout(500)
    out.scroll_into_view_if_needed()
    p.shot("lab-1-picker")

    # a wrong word is said at once and can't be launched
    steps = field(out, "max_steps")
    before = steps.input_value()
    steps.fill("many")
    steps.press("Enter")
    until(lambda: "max_steps" in out.inner_text() and "many" in out.inner_text() and not launch.is_enabled(), 20)
    assert before.isdigit()
    steps.fill("60")
    steps.press("Enter")
    until(lambda: launch.is_enabled(), 60)

    # the first run is short, and its end is a static picture
    launch.click()
    stop = out.locator("button", has_text=re.compile("Stop"))
    stop.wait_for(timeout=60_000)
    until(lambda: state(out) == "done", 180)
    until(lambda: stop.count() == 0, 30)                       # the widgets are gone
    static = out.locator(".widget-html img[src^='data:image/png']").last
    assert static.evaluate("e => e.naturalWidth") > 300
    static.scroll_into_view_if_needed()
    p.shot("lab-2-static")

    # the second one is long: its panel's numbers and its picture change, and it is stopped
    steps.fill("100000")
    steps.press("Enter")
    until(lambda: launch.is_enabled(), 60)
    launch.click()
    stop.wait_for(timeout=60_000)
    until(lambda: state(out) == "running" and re.search(r"\b[1-9]\d* / 100000", out.inner_text()), 120)
    picture = lambda: out.locator(".widget-image").last.get_attribute("src")
    for _ in range(2):
        seen = picture()
        until(lambda seen=seen: picture() != seen, 120)
    out.locator(".widget-image").last.scroll_into_view_if_needed()
    p.shot("lab-3-running")
    stop.click()
    until(lambda: state(out) == "stopped", 120)
    until(lambda: stop.count() == 0, 30)
    p.shot("lab-4-stopped")
    assert page.get_by_text(re.compile(r"Python 3 \(ipykernel\) \| Idle")).count()   # the kernel was free all the while
