"A rank and the arguments of a cell's own, rows that come as a stream, prompts without a tokenizer, and its last line."
import os
import subprocess
import sys

import pytest
import ranks

CELL = """# %%shardtrain
import datasets, torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
model = LlamaForCausalLM(LlamaConfig(vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2))
rows = [dict(input_ids=[5 + i, 6, 7, 8], labels=[5 + i, 6, 7, 8]) for i in range(8)]
train_dataset = datasets.Dataset.from_list(rows).to_iterable_dataset()
args = TrainingArguments(per_device_train_batch_size=1, max_steps=2, save_steps=1, logging_steps=1)
"""


def test_what_the_recipe_says_beside_arguments_of_the_cell_s_own(tmp_path):
    from shardnb.plan.recipe import Recipe
    out = tmp_path / "out"
    run = ranks.train(Recipe(strategy="ddp", nproc=1, output_dir=str(out), save_only_model=True, eval_share=.5), CELL, home=tmp_path / "home", sample_prompts=["Why?"])
    assert len(run.metrics) == 2 and sorted(p.name for p in out.iterdir()) == ["checkpoint-1", "checkpoint-2", "final"]
    assert not any(out.rglob("optimizer.pt")) and not [c for c in run.checkpoints if c.resumable]
    notes = "\n".join(e["message"] for e in run.events("note"))
    for said in ("eval_share has no effect", "rows that come as a stream", "prompts are not answered: the trainer has no tokenizer"): assert said in notes
    assert "tested when it was saved" in run.checkpoints[-1].badge and "run.checkpoints[-1].test()" in repr(run.checkpoints)


def test_trackers_and_folder_of_the_cell_s_arguments(tmp_path):
    from types import SimpleNamespace

    from shardnb.plan.recipe import Recipe
    from shardnb.run.worker import _output, _trackers
    said = []
    trackers = lambda asked, **kw: _trackers(Recipe(**kw), asked, said.append)
    assert [trackers(a) for a in ("none", None, [])] == [["none"], "none", "none"] and trackers(["wandb"]) == ["wandb"] and not said
    assert trackers("none", report_to=["tensorboard"]) == trackers("tensorboard", report_to=["tensorboard"]) == ["tensorboard"] and not said
    assert trackers("wandb", report_to=["tensorboard"]) == ["tensorboard"] and "not wandb" in said.pop()
    w = SimpleNamespace(rundir=SimpleNamespace(checkpoints_path=tmp_path / "checkpoints"), say=said.append)
    assert _output(Recipe(), "trainer_output", w) == str(tmp_path / "checkpoints") and _output(Recipe(), "mine", w) == "mine" and not said
    assert _output(Recipe(output_dir="out"), None, w) == "out" and not said
    assert _output(Recipe(output_dir="out"), "mine", w) == "mine" and "checkpoints go to" in said.pop()


@pytest.mark.parametrize("closed", ["", "sys.stdout.close(); "])
def test_a_rank_ends_at_its_last_line(closed):
    "Whatever went wrong: what a forked rank has inherited must not run on"
    code = f"import atexit, os, runpy, sys; atexit.register(os.write, 2, b'ran on'); sys.argv = ['worker', '/nowhere']; {closed}runpy.run_module('shardnb.run.worker', run_name='__main__')"
    env = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"} | {"RANK": "0"}
    p = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert p.returncode == 1 and "KeyError: 'WORLD_SIZE'" in p.stderr and "ran on" not in p.stderr
