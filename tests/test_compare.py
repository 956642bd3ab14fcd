"""The same work under several strategies in turn: by hand, as a command, with a run that fails, with a loop of the cell's own, and interrupted."""
import json

import pytest

import shardnb
from shardnb.ui.cli import main

RECIPE = dict(model="tiny", dataset="demo", nproc=2, precision="fp32", micro_batch=1, grad_accum=1, max_length=64)
WORDS = ["--model", "tiny", "--dataset", "demo", "--nproc", "2", "--precision", "fp32", "--micro-batch", "1", "--grad-accum", "1", "--max-length", "64"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch): monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))


def test_the_command_prints_one_row_for_each_strategy(capsys):
    assert main(["compare", *WORDS, "--strategies", "ddp,ZeRO-3", "--steps", "4", "--json"]) == 0
    out = capsys.readouterr()
    rows = json.loads(out.out)
    assert [(r["strategy"], r["state"], r["steps"]) for r in rows] == [("ddp", "done", 4), ("zero3", "done", 4)] and rows[1]["loss_diff"] < 1e-5
    assert rows[1]["params"] < .6 * rows[0]["params"] and rows[1]["sent_bytes"] > rows[0]["sent_bytes"] and "zero3: " in out.err
    assert main(["compare", "--runs", f"{rows[0]['run']},{rows[1]['run']}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows


def test_everything_wrong_is_said_before_anything_runs(capsys):
    assert main(["compare", "--model", "tinny", "--dataset", "demo", "--strategies", "ddp,zerro3", "--steps", "2"]) == 2
    said = capsys.readouterr().err
    assert "zerro3" in said and "did you mean 'zero3'" in said and "above 2" in said and not len(shardnb.runs())
    with pytest.raises(shardnb.RecipeError, match="tinny"): shardnb.compare(shardnb.Recipe(**RECIPE | {"model": "tinny"}), strategies=["ddp"])
    with pytest.raises(shardnb.RecipeError, match="is there twice"): shardnb.compare(shardnb.Recipe(**RECIPE), strategies=["zero2", "deepspeed_zero2"])


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
    assert [r.plan["strategy"] for r in c] == ["ddp"] and c["ddp"].ended and not c["ddp"].pids and "ddp" in repr(c)
