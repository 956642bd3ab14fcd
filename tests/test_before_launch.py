"What used to be found by the ranks, some ten seconds later or at the end of a run, is refused before a process starts, and nothing that is there is lost."
import io
import os
import socket
import subprocess
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import shardnb
from shardnb.plan.problem import RecipeError, ShardnbError
from shardnb.plan.recipe import Recipe
from shardnb.run.handle import Run
from shardnb.run.output import claim
from shardnb.run.process import proc_id
from shardnb.run.rundir import RunDir, write_json
from shardnb.run.start import train

OK = dict(model="tiny", dataset="demo", nproc=2, max_steps=1)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    "No run may appear here"
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not list((tmp_path / "home").glob("runs/*/recipe.yaml"))


@pytest.fixture(scope="module", autouse=True)
def planner():
    yield
    from shardnb.run.planner import Planner
    Planner.get().close()


def refused(field, text, cell=None, namespace=None, **options):
    with pytest.raises(RecipeError) as e: train(Recipe(**OK | options), cell=cell, namespace=namespace or {})
    assert [p.field for p in e.value.problems] == [field], str(e.value)
    assert text in str(e.value) and str(e.value).count("\n") == 0
    return e.value.problems[0]


@pytest.mark.parametrize("out,text", [
    ("file", "is a file, not a folder"), ("file/below", "leads through 'file', which is not a folder"), ("file/below/deep", "leads through 'file'"),
    ("gone", "leads through 'gone'"), ("/proc/out", "can't be written to"), ("a" * 300, "can't be written to"), ("../" * 40 + "proc/out", "can't be written to"),
    ("~nobody-of-that-name/x", "a user that there isn't")])
def test_output_dir(out, text, home):
    (home / "file").write_text("mine")
    (home / "gone").symlink_to(home / "nowhere")
    refused("output_dir", text, output_dir=out)
    assert sorted(p.name for p in home.iterdir()) == ["file", "gone"] and (home / "file").read_text() == "mine"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_output_dir_without_permission(home):
    (home / "locked").mkdir(mode=0o500)
    refused("output_dir", "can't be written to: Permission denied", output_dir="locked/out")


@pytest.mark.parametrize("field,n", [("nproc", 100_000), ("nproc", 10**9), ("dataloader_num_workers", 50_000)])
def test_processes_that_no_memory_holds(field, n):
    "They would all be started, and the machine would stand still"
    p = refused(field, "before there is a model; this machine has", **{field: n})
    assert 1 <= int(p.allowed.removeprefix("at most ")) < 10_000


def test_no_space(home, monkeypatch):
    import shutil
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda p: real(p)._replace(free=1000))
    refused("output_dir", "will be written", output_dir="out")
    refused("SHARDNB_HOME", "will be written")  # the run's own folder


def test_whoever_comes_second_puts_its_model_beside(home):
    "Two runs were launched with one output_dir: the later one keeps what the first one wrote; a resumed run goes on in its own folder"
    from types import SimpleNamespace
    from shardnb.run.worker import Worker
    class Model:
        def save_pretrained(self, folder, state_dict=None): (Path(folder) / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}") # no tensors
    told = []
    def worker(id, **plan):
        w = Worker.__new__(Worker)
        w.recipe, w.rundir, w.plan, w.rank, w.world_size = Recipe(output_dir=str(home / "out")), RunDir(home / id), plan, 0, 1
        w.strategy, w.observer = SimpleNamespace(name="ddp"), SimpleNamespace(steps=3, phase=lambda name: None)
        w.engine = SimpleNamespace(full_state_dict=dict, cut=False, model=Model())
        w.events = SimpleNamespace(write=lambda kind, **e: told.append(e.get("path") or e.get("message")))
        return w
    trainer = SimpleNamespace(processing_class=None)
    final = home / "out" / "final"
    final.mkdir(parents=True)
    (final / "adapter.safetensors").write_text("old")
    worker("b").save_final(trainer)
    assert [p.name for p in final.iterdir()] == ["adapter.safetensors"] and (home / "out" / "final-b" / "model.safetensors").exists()
    assert str(home / "out" / "final-b") in told and any("another run" in str(t) for t in told)
    worker("c", resumed="b").save_final(trainer)
    assert sorted(p.name for p in final.iterdir()) == ["model.safetensors", "shardnb-tested.json", "shardnb.json"] and sorted(p.name for p in (home / "out").iterdir()) == ["final", "final-b"]


@pytest.mark.parametrize("left", ["final", "checkpoint-20"])
def test_an_earlier_model_is_not_overwritten(left, home):
    (home / "out" / left).mkdir(parents=True)
    (home / "out" / left / "model.safetensors").write_text("precious")
    p = refused("output_dir", f"holds {left} of an earlier run, which is never overwritten; choose another output_dir", output_dir="out")
    assert p.value == "out" and (home / "out" / left / "model.safetensors").read_text() == "precious"


def test_where_a_run_of_another_home_saves(home, monkeypatch):
    one = RunDir.create("model: tiny\n", home=home / "elsewhere")
    write_json(one.state_path, dict(state="running", supervisor=proc_id(), host=socket.gethostname(), heartbeat=time.time()))
    claim(home / "out", one)
    refused("output_dir", f"is where run {one.id} saves", output_dir="out")
    monkeypatch.setattr("shardnb.run.start.output_problems", lambda *a, **kw: [])   # it began after we had looked
    refused("output_dir", f"is where run {one.id} saves", output_dir="out")
    assert os.listdir(home / "out") == [".shardnb-run.json"]


def test_folders_that_other_options_name(home, monkeypatch):
    monkeypatch.setattr("shardnb.run.compiled.is_built", lambda op: True)  # else that is wrong too, and told
    refused("nvme_path", "can't be written to", strategy="zero3+optim-nvme", nvme_path="/proc")
    code, _, err = shell("demo", "--folder", "/proc/pictures")
    assert code == 2 and "--folder: '/proc/pictures' can't be written to" in err


def test_names_that_nobody_makes():
    p = refused("cell", "line 2: learning_rat is used", cell="learning_rate = 1\nprint(learning_rat)")
    assert p.nearest == "learning_rate"
    refused("cell", "rows_of", cell="train_dataset = rows_of(3)\nmodel = 1", namespace={"rows": 1})
    refused("cell", "ranks have no IPython", cell="display(rank)")
    refused("out", "the cell makes no histry", cell="history = []", out=["histry"])
    refused("out", "there is no cell", out=["model"])


def test_everything_wrong_is_said_at_once(home):
    (home / "file").write_text("")
    with pytest.raises(RecipeError) as e: train(Recipe(**OK | dict(output_dir="file", dataset="deom", out=["y"])), cell="x = unheard_of", namespace={})
    assert sorted(p.field for p in e.value.problems) == ["cell", "dataset", "out", "output_dir"]


@pytest.mark.parametrize("answer,text", [("no", "is not on the hub"), ("unreached", "could not be fetched from the hub"), ("yes", None), ("unclear", None)])
@pytest.mark.parametrize("field", ["model", "dataset"])
def test_the_hub_is_asked_when_there_is_a_network(answer, text, field, home, monkeypatch):
    from shardnb.run import formats, hub, models
    look = lambda: formats.check_dataset(Recipe(dataset="squad")) if field == "dataset" else models.model_problems(Recipe(model="rajpurkar/squad"))
    for n in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"): monkeypatch.delenv(n, raising=False)
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    monkeypatch.setattr(hub, "_there", set())
    monkeypatch.setattr(hub, "_asked", lambda name, kind: answer)
    said = look()
    assert (not said) if text is None else (text in str(said[0]) and said[0].field == field)
    (home / "hf" / "hub" / f"{field}s--rajpurkar--squad").mkdir(parents=True)
    assert bool(look()) is (answer == "no")


# Ranks and ids

def shell(*words):
    from shardnb.ui.cli import main
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err): code = main(list(words))
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path / "other"))
    return Run(RunDir.create("model: tiny\n", plan={"strategy": "zero3", "nproc": 2, "world_size": 2}))


@pytest.mark.parametrize("rank", ["7", "-1", "first", "1.5", "../../recipe"])
def test_a_rank_that_there_is_not(rank, run):
    code, out, err = shell("logs", run.id, f"--rank={rank}")
    assert (code, out) == (2, "") and f"rank: '{rank}' is not a rank of run {run.id}; allowed: 0, 1, supervisor" in err and err.count("\n") == 1
    from shardnb.ui.card import log_html
    for use in (lambda: run.logs(rank=rank), lambda: run.logs(rank=7), lambda: run.events("step", rank=rank), lambda: run.events(rank=7), lambda: log_html(run, 7)):
        with pytest.raises(ShardnbError, match="is not a rank of run"): use()


def test_a_rank_that_has_said_nothing_yet(run):
    assert shell("logs", run.id, "--rank", "1") == (0, "", "nothing yet in the log of rank 1\n")
    assert run.logs("1") == run.logs(1) == "" and run.events("step", rank=1) == []


@pytest.mark.parametrize("words", [("logs", "nonsense"), ("attach", "nonsense"), ("stop", "nonsense"), ("logs", "../x"), ("stop", "")])
def test_a_run_that_there_is_not(words, run):
    code, out, err = shell(*words)
    assert (code, out) == (2, "") and err.startswith("shardnb: id: ") and err.count("\n") == 1
    with pytest.raises(ShardnbError): shardnb.attach(words[1])
    with pytest.raises(ShardnbError, match="there is no run"): Run(Path("nowhere") / "nonsense")


def test_no_path_of_this_machine_in_a_saved_notebook(home, monkeypatch):
    monkeypatch.delenv("SHARDNB_HOME")
    run = Run(RunDir.create("model: tiny\n", plan={}))
    (run.dir / "checkpoints" / "checkpoint-2").mkdir()
    from shardnb.run.event import EventWriter
    EventWriter(run.rundir.event_path(0), 0).write("checkpoint", path="checkpoints/checkpoint-2", step=2, complete=True)
    assert f".shardnb/runs/{run.id}" in run._repr_html_()
    assert str(home) not in run._repr_html_() + repr(run) + repr(run.checkpoints) + run.panel().__class__.__name__


def test_undefined_names_are_found_by_ruff(tmp_path):
    "The configuration hides no name: a module that forgot its import is told so"
    (tmp_path / "bad.py").write_text('def f() -> "pandas.DataFrame": return matplotlib, Panel, _\n')
    root = Path(__file__).resolve().parent.parent
    out = subprocess.run(["ruff", "check", "--config", str(root / "pyproject.toml"), "--output-format", "concise", str(tmp_path / "bad.py")], capture_output=True, text=True).stdout
    assert out.count("F821") == 4


def test_rows_that_nothing_can_be_learned_from(home):
    "A small file is read before the launch anyway, for its longest row"
    (home / "rows.jsonl").write_text(('{"prompt": "' + "why " * 200 + '", "completion": "so"}\n') * 4)
    p = refused("max_length", "no row has an answer within 64 tokens", dataset="rows.jsonl", max_length=64)
    assert p.nearest


def test_auto_is_not_blamed_for_what_keeps_it_from_choosing():
    with pytest.raises(RecipeError) as e: train(Recipe(model="tiny", dataset="nothere.jsonl", strategy="auto", global_batch=7, micro_batch=2))
    assert {p.field for p in e.value.problems} == {"dataset", "global_batch"}, e.value.problems


def test_rows_of_a_model_of_the_cell_s_own_need_a_tokenizer():
    cell = "from transformers import AutoConfig, AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained('x'))\n"
    with pytest.raises(RecipeError) as e: train(Recipe(dataset="demo", nproc=2), cell=cell, namespace={})
    assert [p.field for p in e.value.problems] == ["tokenizer"] and "vocabulary" in str(e.value)
