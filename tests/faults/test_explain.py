"Failures are explained: real texts are recognised, the first cause is shown with rank, line and remedy, and a full memory comes with the changes that fit."
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from notebook_kernel import Kernel
from real_errors import PROVOKE, text_of
from waiting import within

import shardnb
from shardnb.plan.machine import oom_kills
from shardnb.run.explain import first_cause, write_error
from shardnb.run.handle import Run
from shardnb.run.registry import attach
from shardnb.run.launch import LocalLauncher
from shardnb.run.rundir import RunDir, read_json
from shardnb.run.translate import KNOWN, translate

CASES = [(name, f) for name, fs in PROVOKE.items() for f in fs]


@pytest.fixture(scope="session")
def libraries():
    "Imported before anything forks"
    for m in ("transformers", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "peft", "trl.chat_template_utils", "datasets", "transformers.models.llama.modeling_llama", "torch.distributed.fsdp"): importlib.import_module(m)


def provoked(make, tmp_path, rundir):
    "What a provocation raises, as text; it happens in a child, so that what it leaves in the libraries (process groups, states, patches) is gone with that"
    said = tmp_path / "said.json"
    pid = os.fork()
    if not pid:
        try:
            make(tmp_path)
            said.write_text(json.dumps(["nothing was raised", None]))
        except BaseException as e:  # torch's CheckpointException is no Exception
            skipped = isinstance(e, pytest.skip.Exception)
            if not skipped: write_error(rundir, 0, e)
            said.write_text(json.dumps([text_of(e), str(e) if skipped else None]))
        finally: os._exit(0)
    os.waitpid(pid, 0)
    text, skip = json.loads(said.read_text())
    if skip is not None: pytest.skip(skip)
    return text


@pytest.mark.parametrize("name, make", CASES, ids=[f.__name__ for _, f in CASES])
def test_a_real_text_is_recognised(libraries, tmp_path, name, make):
    rundir = RunDir.create("model: tiny\n", home=tmp_path / "home")
    text = provoked(make, tmp_path, rundir)
    known = translate(text)
    assert known and known.name == name and known.quoted is None, text
    error = first_cause(rundir, {0: 1})
    assert known.what in error["message"] and error["fix"] == known.advice and error["topic"] == name
    assert translate(error["message"]) is known  # the original words are kept


def test_every_row_is_provoked_or_quoted():
    assert len(KNOWN) >= 25 and len(CASES) >= 18
    provoked = {k.name for k in KNOWN if not k.quoted}
    assert provoked == set(PROVOKE) and len(provoked) >= 18
    for k in KNOWN:
        if k.quoted: assert k.quoted.startswith("https://")


HERE = {"https://github.com/pytorch/pytorch/blob/main/torch/": "torch/", "https://github.com/deepspeedai/DeepSpeed/blob/master/op_builder/": "deepspeed/ops/op_builder/",
        "https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/": "deepspeed/", "https://github.com/huggingface/transformers/blob/main/src/transformers/": "transformers/"}


@pytest.mark.parametrize("known", [k for k in KNOWN if k.quoted and k.quoted.endswith(".py") and k.quoted.startswith(tuple(HERE))], ids=lambda k: k.name)
def test_a_quoted_text_still_stands_in_the_installed_library(known):
    start = next(h for h in HERE if known.quoted.startswith(h))
    package, _, rest = known.quoted.replace(start, HERE[start]).partition("/")
    source = Path(importlib.util.find_spec(package).origin).with_name(rest.split("/")[0]).parent.joinpath(rest).read_text(encoding="utf-8")
    joined = re.sub(r'"\s*\n\s*f?"', "", source) # a text over several lines
    words = max(re.findall(r"[A-Za-z_']{4,}(?: [A-Za-z_']+)*", known.said), key=len).split()[:6] # values may follow
    assert " ".join(words) in joined, words


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    return tmp_path


until = within(120)


# --- the user's line

RAISES = """# %%shardtrain
import torch
seen = [0]
def check(module, args, out):
    if type(module).__name__ == "LlamaForCausalLM": seen[0] += 1
    if rank == 1 and seen[0] > 2: raise ValueError("a bad <b>batch</b>")
torch.nn.modules.module.register_module_forward_hook(check)
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    "A real run under zero3, in which rank 1 raises in its third forward pass"
    with pytest.MonkeyPatch.context() as m:
        m.setenv("SHARDNB_HOME", str(tmp_path_factory.mktemp("home")))
        run = shardnb.train(shardnb.Recipe(model="tiny", dataset="demo", strategy="zero3", nproc=2, max_steps=6, micro_batch=2, max_length=128), RAISES)
        with pytest.raises(shardnb.RunFailed) as caught: run.wait(180)
        return caught.value


def test_an_error_in_the_cell_names_rank_and_line(failed):
    e = failed.error
    assert (e.rank, e.phase, e.cause, e.cell_line) == (1, "training", "ValueError", 6) and e.cell_text.startswith("if rank == 1 and seen[0] > 2: raise ValueError(")
    assert e.message == "ValueError: a bad <b>batch</b>" and e.topic is None
    assert str(failed).splitlines()[0] == f"{e.where}: ValueError: a bad <b>batch</b>" and "line 6 of the cell: if rank == 1" in str(failed).splitlines()[1]
    assert "cell.py\", line 6" in e.traceback and "shardnb/run/" not in e.traceback and "transformers" in e.traceback
    assert any(o.startswith("rank 0:") for o in e.others) or len(list(failed.run.rundir.errors_path.glob("rank*.json"))) == 1


def test_a_rank_leaves_memory_limits_and_collectives(failed):
    left = read_json(failed.run.rundir.error_path(1))
    device = left["memory"]["device"]
    assert {"params", "grads", "optimizer", "context"} <= set(device) and all(n > 0 for n in device.values()) and "unknown" not in left
    assert left["limit"]["host"] > 2**28 and left["limit"]["device"] is None and left["rss"] > device["context"] / 2
    assert left["device"] == "cpu" and 1 <= len(left["collectives"]) <= 5 and all(isinstance(kind, str) and n >= 0 for kind, n in left["collectives"])
    assert "forward" in left["during"] and "shardnb/run/worker.py" in left["traceback"]
    assert failed.error.breakdown == left["memory"]


def test_the_account_is_escaped_and_folded(failed):
    page = failed._repr_html_()
    assert "a bad &lt;b&gt;batch" in page and "<b>batch" not in page
    assert page.index("a bad") < page.index("line 6 of the cell") < page.index("<details") and page.count("<details") >= 2
    assert page in failed.run._repr_html_() and page in shardnb.run.handle.Run(failed.run.rundir)._repr_html_()
    assert "ValueError: a bad" in repr(failed.run) and "\n" not in repr(failed.run)


def test_a_kernel_shows_it(failed, tmp_path):
    "A real kernel: the exception's text is short, and the folded account stands above it"
    kernel = Kernel(tmp_path)
    try: _, said = kernel.messages(f"import shardnb\nshardnb.attach({failed.run.id!r}, {str(failed.run.dir.parent.parent)!r}).wait()", timeout=60)
    finally: kernel.kill()
    shown = [m["content"] for m in said if m["msg_type"] in ("display_data", "error")]
    assert [("ename" in c) for c in shown] == [False, True], said
    assert "<details" in shown[0]["data"]["text/html"] and "<b>batch" not in shown[0]["data"]["text/html"]
    text = "\n".join(shown[1]["traceback"])
    assert shown[1]["ename"] == "RunFailed" and "line 6 of the cell" in text and "File \"" not in text and len(text.splitlines()) < 15


def test_without_a_cell_the_librarys_frames_are_shown_and_ours_are_not(libraries, tmp_path):
    from datasets import Dataset, Features, List, Value

    from shardnb.run.data import pad_to_full_batches
    rundir = RunDir.create("model: tiny\n", home=tmp_path)
    unsigned = Dataset.from_dict({"input_ids": [[1]], "labels": [[1]]}, features=Features({"input_ids": List(Value("uint8")), "labels": List(Value("uint8"))}))   # which can't hold -100
    with pytest.raises(Exception) as caught: pad_to_full_batches(unsigned, 2, 1, 1)
    left = write_error(rundir, 0, caught.value, "tokenizing")
    error = first_cause(rundir, {0: 1})
    assert left["cell_line"] is None and "shardnb/run/data.py" in left["traceback"]
    assert "shardnb/run" not in error["traceback"] and "datasets/arrow_dataset.py" in error["traceback"] and error["topic"] is None


def test_our_own_words_are_kept_with_the_remedy_of_what_they_came_from(libraries, tmp_path):
    from shardnb.run.models import model_config
    rundir = RunDir.create("model: tiny\n", home=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(shardnb.RecipeError) as caught: model_config(shardnb.Recipe(model=str(tmp_path)), str(tmp_path))
    write_error(rundir, 0, caught.value, "loading")
    error = first_cause(rundir, {0: 1})
    assert error["message"].startswith("model: no model could be loaded") and error["topic"] == "no-model" and "config.json" in error["fix"]


def test_an_error_while_looking_at_an_error_hides_nothing(tmp_path):
    class Gone: # a device that answers nothing any more
        @property
        def engine(self): raise RuntimeError("CUDA error: device-side assert triggered")
    rundir = RunDir.create("model: tiny\n", home=tmp_path)
    with pytest.raises(ValueError) as caught: raise ValueError("the first")
    try: write_error(rundir, 0, caught.value, "training", 1, Gone())
    except RuntimeError: pytest.fail("the second error came out")
    left = read_json(rundir.error_path(0))
    assert left["message"] == "the first" and left["memory"] is None and "device-side assert" in left["unknown"]["limit"] and "during" in left["unknown"]


# --- memory

LIMITED = """# %%shardtrain
import resource
here = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (here + (450 << 20), resource.RLIM_INFINITY))
train_dataset = [{"text": "the quick brown fox %d " % i * 100} for i in range(64)]
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of addresses is Linux's")
def test_a_full_memory_comes_with_what_fits_and_that_does_fit(home):
    recipe = shardnb.Recipe(model="tiny", strategy="ddp", nproc=2, max_steps=1, micro_batch=16, grad_accum=1, max_length=1024)
    run = shardnb.train(recipe, LIMITED)
    with pytest.raises(shardnb.RunFailed) as caught: run.wait(180)
    e = caught.value.error
    assert e.topic == "memory" and "the host's memory is full" in e.message and "can't allocate memory" in e.message, e.message
    assert re.search(r"[GM]iB more were asked for \((activations|logits|temp)\); most is held by (activations|logits)", e.message), e.message
    assert e.limit["process"] and e.breakdown["device"]["activations"] > e.breakdown["device"]["params"]
    assert e.suggestions and read_json(run.rundir.errors_path / "advice.json")["suggestions"] == e.suggestions
    assert all(s["peak_bytes"] < run.predicted.peak for s in e.suggestions) and e.suggestions[0]["options"] in str(caught.value)
    t = time.monotonic()
    assert run.error == e and time.monotonic() - t < .5     # asked once
    from shardnb.ui.options import OptionParser, add_recipe_options, changes_of, parse_options, split_line
    changes = changes_of(parse_options(add_recipe_options(OptionParser(prog="shardtrain")), split_line(e.suggestions[0]["options"])))
    again = shardnb.train(recipe.replace(**changes), LIMITED)
    again.wait(180)
    assert again.state == "done" and len(again.metrics) == 1


@pytest.fixture
def cage():
    "A control group with 700 MiB; skips where none can be made"
    for top, limit in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        group = top / f"shardnb-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(700 << 20))
            break
        except OSError as e:
            why = e
            if group.is_dir(): group.rmdir()
    else: pytest.skip(f"no control group can be made here: {why}")
    yield group
    until(lambda: not (group / "cgroup.procs").read_text().strip(), 20)
    group.rmdir()


START = """import sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
from shardnb.run.launch import LocalLauncher
from shardnb.run.rundir import RunDir
rundir = RunDir.create("model: tiny\\n", plan={"strategy": "ddp", "nproc": 2, "world_size": 2, "env": {}, "test": {"most": 100}})
LocalLauncher("hog_worker").start(rundir)
print(rundir.id)
"""


def test_a_kill_by_the_kernel_is_proved(home, cage, monkeypatch):
    monkeypatch.setenv("SHARDNB_POOL", "0") # the pool lives outside of the cage
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    p = subprocess.run([sys.executable, "-c", START, str(cage)], capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    run = attach(p.stdout.strip())
    until(lambda: run.ended, 90)
    end = json.loads(run.rundir.exit_path.read_text())
    assert end["oom_kill"] >= 1 and end["returncodes"]["1"] == -9
    e = run.error
    assert (e.rank, e.cause, e.topic, e.phase, e.step) == (1, "SIGKILL", "memory", "training", 2)
    assert "killed by the kernel for lack of memory (the control group counted 1)" in e.message and "it was last measured with 512 MiB, and all ranks share 700 MiB" in e.message
    assert e.breakdown == {"device": {"activations": 3 << 27, "params": 1 << 27}} and e.fix


def test_a_kill_by_somebody_is_not_called_a_full_memory(home, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("SHARDNB_POOL", "0") # another path is another pool, which would be started for this alone
    rundir = RunDir.create("model: tiny\n", plan={"strategy": "ddp", "nproc": 2, "world_size": 2, "env": {}, "test": {"most": 1}})
    LocalLauncher("hog_worker").start(rundir)
    run = Run(rundir)
    try:
        until(lambda: len(run.events("memory")) == 2 and len(run.pids) == 2)
        os.kill(run.pids[1], signal.SIGKILL)
        until(lambda: run.ended)
    finally: run.kill()
    counts = oom_kills() is not None
    assert read_json(rundir.exit_path)["oom_kill"] == (0 if counts else None)
    assert (run.error.rank, run.error.cause, run.error.topic, run.error.suggestions) == (1, "SIGKILL", None, [])
    assert ("not by the kernel" if counts else "perhaps for lack of memory") in run.error.message
