"""The same work under several strategies in turn: by hand, as a command, with a run that fails, with a loop of the cell's own, and interrupted."""
import json

import longrun
import pytest

import shardnb
from shardnb.plan.problem import PlanError
from shardnb.run.handle import Run
from shardnb.ui.charts import beside, memory_rows
from shardnb.ui.cli import main, memory_lines

RECIPE = dict(model="tiny", dataset="demo", nproc=2, precision="fp32", micro_batch=1, grad_accum=1, max_length=64)
WORDS = ["--model", "tiny", "--dataset", "demo", "--nproc", "2", "--precision", "fp32", "--micro-batch", "1", "--grad-accum", "1", "--max-length", "64"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch): monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))


def test_the_command_prints_one_row_for_each_strategy(capsys):
    assert main(["compare", *WORDS, "--strategies", "ddp,ZeRO3_offload_optimizer", "--steps", "4", "--json"]) == 0
    out = capsys.readouterr()
    rows = json.loads(out.out)
    assert [(r["strategy"], r["state"], r["steps"]) for r in rows] == [("ddp", "done", 4), ("zero3+optim-cpu", "done", 4)] and rows[1]["loss_diff"] < 1e-4
    assert rows[1]["params"] < .6 * rows[0]["params"] and rows[1]["sent_bytes"] > rows[0]["sent_bytes"] and "zero3+optim-cpu: " in out.err
    # what is offloaded is seen: master copy and two moments of half of the parameters, and gradients
    assert rows[0]["host_bytes"] is None and rows[1]["host_bytes"] > 11 * rows[0]["params"] / 4 / 2
    run = shardnb.attach(rows[1]["run"])
    assert [line.split(":")[0].split(None, 2)[2] for line in memory_lines(run)] == ["device peak"] * 2 + ["host after step"] * 2
    assert [r[2] for r in beside(memory_rows(run.newest), run.predicted) if r[1] == "host"][-2:] == ["after_step", "predicted"]
    assert main(["compare", "--runs", f"{rows[0]['run']},{rows[1]['run']}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows


def test_everything_wrong_is_said_before_anything_runs(capsys):
    assert main(["compare", "--model", "tinny", "--dataset", "demo", "--strategies", "ddp,zerro3", "--steps", "2"]) == 2
    said = capsys.readouterr().err
    assert "zerro3" in said and "did you mean 'zero3'" in said and "above 2" in said and not len(shardnb.runs())
    with pytest.raises(shardnb.RecipeError, match="tinny"): shardnb.compare(shardnb.Recipe(**RECIPE | {"model": "tinny"}), strategies=["ddp"])
    with pytest.raises(shardnb.RecipeError, match="is there twice"): shardnb.compare(shardnb.Recipe(**RECIPE), strategies=["zero2", "deepspeed_zero2"])


def test_runs_that_are_there_go_with_no_other_option(capsys):
    assert main(["compare", "mine.yaml", "--runs", "20991231", "--strategies", "ddp", "--steps", "5", "--nproc", "2"]) == 2
    assert "doesn't go with --strategies, --steps, --nproc, mine.yaml" in capsys.readouterr().err
    assert main(["compare", "--runs", "20991231,20991232"]) == 2
    said = capsys.readouterr().err
    assert "no run '20991231'" in said and "no run '20991232'" in said
    assert main(["compare", "--runs", ""]) == 2 and "names no run" in capsys.readouterr().err


@pytest.mark.parametrize("why, left", [(KeyboardInterrupt(), {"zero2": "interrupted", "zero3": "interrupted"}), (PlanError("the planner is gone"), {"zero2": "the planner is gone"})])
def test_what_keeps_a_later_run_from_starting_leaves_those_before(why, left, tmp_path, monkeypatch):
    "An interrupt ends it all, an error that strategy alone"
    def train(recipe, **kw):
        if recipe.strategy == "zero2": raise why
        longrun.ended(rundir := longrun.make(tmp_path, 4, plan=dict(strategy=recipe.strategy)))
        return Run(rundir)
    monkeypatch.setattr("shardnb.run.compare.train", train)
    monkeypatch.setattr("shardnb.run.compare.checked", lambda *a: (None, None, []))
    c = shardnb.compare(shardnb.Recipe(**RECIPE), strategies="ddp,zero2,zero3", steps=4)
    assert c.names == [n for n in ("ddp", "zero2", "zero3") if n not in left] and c.left == left and "zero2 was not run" in repr(c)


def test_a_run_that_fails_is_a_row(capsys, tmp_path):
    cell = tmp_path / "cell.py"
    cell.write_text("if recipe.strategy == 'zero1': raise ValueError('not under zero1')\n")
    assert main(["compare", *WORDS, "--strategies", "zero1,ddp", "--steps", "3", "--cell", str(cell), "--json"]) == 1
    out = capsys.readouterr()
    assert [(r["strategy"], r["state"]) for r in json.loads(out.out)] == [("zero1", "failed"), ("ddp", "done")] and "not under zero1" in out.err


LOOP = """
import torch
model = torch.nn.Linear(8, 1)
opt = torch.optim.AdamW(model.parameters())
model, opt = accelerator.prepare(model, opt)
for step in range(100_000):
    loss = model(torch.ones(4, 8)).pow(2).mean()
    accelerator.backward(loss)
    opt.step(); opt.zero_grad()
    log(loss=loss)
"""


def test_a_loop_that_knows_no_end_is_stopped():
    c = shardnb.compare(shardnb.Recipe(nproc=2, precision="fp32"), LOOP, strategies="ddp", steps=5)
    assert list(c.table.state) == ["stopped"] and c.table.steps[0] >= 5


def test_an_interrupt_gives_what_there_is():
    raised = []
    def interrupt(c):
        if c.runs[-1].events("step") and not raised:
            raised.append(1)
            raise KeyboardInterrupt
    c = shardnb.compare(shardnb.Recipe(**RECIPE), strategies="ddp,fsdp", steps=2000, on_change=interrupt)
    assert [r.plan["strategy"] for r in c] == ["ddp"] and c["ddp"].ended and not c["ddp"].pids and "ddp" in repr(c) and c.left == {"fsdp": "interrupted"}
