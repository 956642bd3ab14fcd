"Runs that hang, and runs that learn nothing: really provoked, and named."
import math
import os
import signal

import pytest
from unruly import warned
from waiting import within

import shardnb
from shardnb.run.launch import alive
from shardnb.run.rundir import read_json
from shardnb.ui.card import phases_of, stall_html, summary, text_line

QUICK = {"SHARDNB_STALL_AFTER": "0.2"}   # 2 s without progress where a user's run has 300
LM = dict(model="tiny", dataset="demo", max_length=128, max_samples=64, micro_batch=2, learning_rate=1e-3)


@pytest.fixture
def train(tmp_path, monkeypatch):
    "Starts runs in a home of their own, and leaves no process behind"
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    started = []

    def go(cell=None, **recipe):
        started.append(shardnb.train(shardnb.Recipe(**dict(strategy="ddp", nproc=2, timeout=600, env=QUICK) | recipe), cell=cell))
        return started[-1]
    yield go
    for run in started: run.kill()


until = within(90)


def stall(run, kind, said=""):
    "The stall of that kind with these words; while a rank still imports, another may come before it"
    def look():
        assert not run.ended, run.error
        return (s := run.stall) and s["kind"] == kind and said in s["message"] and s
    return until(look)


HANGS = {
    "still": ("if rank == 0: dist.barrier()\nelse: time.sleep(600)", [1], 6, "stands still at line 6 of the cell (else: time.sleep(600)); rank 0 waits for it in barrier"),
    "left": ("for _ in range(6 - rank): dist.all_reduce(x)", [1], None, "rank 1 left the loop early; rank 0 waits in all_reduce of 32 B"),
    "mismatch": ("for _ in range(3): dist.all_reduce(x)\nif rank == 0: dist.broadcast(x, 1)\nelse: dist.all_reduce(torch.ones(80))", [0, 1], 6,
                 "rank 0 is in broadcast of 32 B, its collective number 4, at line 6 of the cell (if rank == 0: dist.broadcast(x, 1)); rank 1 is in all_reduce of 320 B"),
}


@pytest.mark.parametrize("kind", HANGS)
def test_who_is_behind_and_what_the_others_wait_in(train, kind):
    body, ranks, line, said = HANGS[kind]
    run = train(f"import time\nimport torch\nimport torch.distributed as dist\nx = torch.ones(8)\n{body}\n")
    s = stall(run, kind, said)
    assert (s["ranks"], s["cell_line"]) == (ranks, line)
    assert {"cell.py", "worker.py"} & {word for text in s["stacks"].values() for word in ("cell.py", "worker.py") if word in text} and set(s["stacks"]) == {"0", "1"}
    until(lambda: run.stalled == ranks, 5)
    assert s["message"] in summary(run)["doing"] and "stalled since" in text_line(run)
    assert "where every rank stands" in stall_html(run) and "<module>" not in stall_html(run)   # escaped
    assert run.warnings.iloc[-1].topic == "stall" and run.warnings.iloc[-1].fix == s["fix"]


def test_a_rank_in_an_endless_loop_ends_the_run_when_the_others_give_up(train):
    run = train("import torch, torch.distributed as dist\nx = torch.ones(8)\nfor step in range(5):\n    dist.all_reduce(x)\n    if rank == 1 and step == 2:\n        while True: pass\n", timeout=10)
    s = stall(run, "busy", "at line 6 of the cell")
    assert s["message"] == "rank 1 is busy in Python at line 6 of the cell (while True: pass); rank 0 waits for it in all_reduce of 32 B"
    assert s["stands"]["0"]["last"] == [["all_reduce", 32]] * 4 and s["stands"]["1"]["busy"] > .05 > s["stands"]["0"]["busy"]
    procs = [{"pid": e["pid"], "create_time": e["create_time"]} for e in run.events("start")]
    until(lambda: run.ended, 30)
    end = read_json(run.rundir.exit_path)
    assert (run.state, run.error.cause, run.error.rank, run.error.cell_line, run.error.message) == ("failed", "stalled", 1, 6, s["message"])
    assert "cell.py" in end["error"]["stacks"]["1"] and end["survivors"] == [] and not any(map(alive, procs))
    with pytest.raises(shardnb.RunFailed, match="busy in Python"): run.wait()


def test_a_stall_that_passes_leaves_nothing(train, tmp_path):
    run = train(f"import os, time, torch, torch.distributed as dist\nwhile rank == 1 and not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(.1)\ndist.barrier()\n")
    stall(run, "still", "of the cell")
    (tmp_path / "go").touch()
    until(lambda: run.ended)
    assert run.state == "done" and run.stall is None and not run.rundir.stall_path.exists() and not len(run.warnings)


def test_a_stopped_process_is_named(train):
    run = train("import torch, torch.distributed as dist\nwhile True: dist.all_reduce(torch.ones(8))\n")
    pid = until(lambda: run.pids.get(1))
    until(lambda: (read_json(run.rundir.heartbeat_path(1)) or {}).get("calls", 0) > 9)
    os.kill(pid, signal.SIGSTOP)
    try: assert stall(run, "frozen")["ranks"] == [1]
    finally: os.kill(pid, signal.SIGCONT)
    until(lambda: run.stall is None and not run.ended, 10)   # it goes on


COLLATOR = """
import time, torch.distributed as dist
from shardnb.run.data import collator_for
from shardnb.run.models import load_tokenizer
plain, batches = collator_for(recipe, load_tokenizer(recipe)), 0
def data_collator(rows):
    global batches
    batches += 1
    {what}
    return plain(rows)
"""


def test_data_that_doesnt_come_under_a_trainer(train):
    "rank 1's collator hangs after four steps; rank 0 waits where the ranks count their labels"
    run = train(COLLATOR.format(what="if rank == 1 and batches == 5: time.sleep(600)"), max_steps=20, **LM)
    s = stall(run, "data", "rank 1 waits for data at line 9 of the cell")
    assert s["ranks"] == [1] and "rank 0 waits for it in all_gather" in s["message"]
    assert {x["phase"] for x in s["stands"].values()} == {"training"} and s["stands"]["0"]["calls"] > 4


SLOW_DATA = """
import time, torch
from transformers import Trainer, TrainingArguments
class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def forward(self, x, y): return dict(loss=(self.net(x) - y).pow(2).mean())
def data_collator(rows):
    time.sleep(.06)
    return {k: torch.stack([r[k] for r in rows]) for k in ("x", "y")}
rows = [dict(x=torch.randn(4), y=torch.randn(1)) for _ in range(128)]
args = TrainingArguments(max_steps=26, per_device_train_batch_size=2, logging_steps=1, save_strategy="no", remove_unused_columns=False)
trainer = Trainer(model=Line(), args=args, train_dataset=rows, data_collator=data_collator)
"""


def test_waiting_for_data_is_said_once(train):
    run = train(SLOW_DATA)
    until(lambda: run.ended)
    told = warned(run, "slow")
    assert {w["rank"] for w in told} == {0, 1} and len(told) == 2, run.error   # each has its own data
    assert all("data-bound" in w["message"] and w["fix"] == "dataloader_num_workers=2" for w in told)
    assert run.bottleneck["bound"] == "data" and .3 < run.bottleneck["share"] < 1


def loop(opt="AdamW(model.parameters(), lr=1e-3)", poison="0", before="pass"): return LOOP.format(opt=opt, poison=poison, before=before)


LOOP = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
opt = torch.optim.{opt}
rows = torch.randn(64, 5)
rows[37, 0] = {poison}
loader = torch.utils.data.DataLoader(rows, batch_size=4)
model, opt, loader = accelerator.prepare(model, opt, loader)
for step, b in enumerate(loader, 1):
    loss = (model(b[:, :4]) - b[:, 4:]).pow(2).mean()
    {before}
    accelerator.backward(loss)
    opt.step(); opt.zero_grad()
    log(loss=loss)
"""


def test_a_wait_inside_ddps_backward_pass(train):
    "There rank 0 waits in C++, where Python sees no call"
    s = stall(train(loop(before="if rank == 1 and step == 4: __import__('time').sleep(600)")), "still", "rank 0 waits for it in all_reduce of 20 B")
    assert s["ranks"] == [1] and s["stands"]["0"]["collective"]["since"] <= s["t"]
    assert s["limit"] < 2   # of measured steps (these are short), not the patience of a start


def test_a_poisoned_row_is_found_in_its_step_on_its_rank(train):
    run = train(loop(poison="float('nan')")).wait()
    first = min(warned(run, "nan"), key=lambda w: w["step"])
    assert (first["rank"], first["step"], first["message"]) == (1, 5, "the loss is NaN in step 5, in the rows of rank 1")   # row 37 is in batch 9 of 4: the 5th of rank 1
    assert "1) the rows" in first["fix"] and math.isnan(run.metrics.loss.iloc[-1]) and len(run.metrics) == 8   # and the run went on


def test_a_learning_rate_beyond_all_reason(train):
    run = train(loop("SGD(model.parameters(), lr=1e9)")).wait()
    nan, blown = warned(run, "nan")[0], warned(run, "lr")[-1]
    assert warned(run, "lr")[0]["step"] == 1 and blown["step"] == 2 and "has diverged" in blown["message"]
    assert not math.isfinite(run.metrics.set_index("step").loss[nan["step"]]) and math.isfinite(run.metrics.set_index("step").loss[nan["step"] - 1])   # in that very step
    assert "1) the learning rate (1e+09): far too high" in nan["fix"]


def test_a_learning_rate_of_zero(train):
    run = train(loop("SGD(model.parameters(), lr=0.)")).wait()
    assert [(w["step"], w["rank"]) for w in warned(run, "lr")] == [(3, 0)] and "has been 0 in all 3 steps" in warned(run, "lr")[0]["message"]


def test_labels(train):
    "All masked: refused before the first step. All of one step masked: said in that step"
    row = "dict(input_ids=[1, 2, 3, 4], labels=[-100] * 4)"
    lm = {k: v for k, v in LM.items() if k != "dataset"}
    run = train(f"train_dataset = [{row}] * 16\n", **lm)
    with pytest.raises(shardnb.RunFailed, match="all labels of all 16 rows are masked"): run.wait()
    assert run.error.phase == "tokenizing"
    run = train(f"train_dataset = [{row}] * 15 + [dict(input_ids=[1, 2, 3, 4], labels=[1, 2, 3, 4])]\n", **lm).wait()
    told, = warned(run, "labels")
    assert run.metrics.loss[told["step"] - 1] == 0 and told["message"] == f"every label of step {told['step']} is masked (-100): it trains nothing"


ADAPTER = """
from peft import LoraConfig, get_peft_model
from shardnb.run.models import load_model
model = get_peft_model(load_model(recipe), LoraConfig(r=4, target_modules="all-linear"))
for name, part in model.named_{kind}s():
    {what}
"""


SEVERED = "if isinstance(getattr(part, 'scaling', 0), dict): part.scaling = {k: 0. for k in part.scaling}"   # the adapters are multiplied by nothing


@pytest.mark.parametrize("strategy, kind, what, said", [
    ("fsdp", "module", SEVERED, "every lora_B is exactly zero"),
    pytest.param("zero3", "module", SEVERED, "every lora_B is exactly zero", marks=pytest.mark.slow),
    ("ddp", "parameter", "part.requires_grad = 'norm' in name", "they are frozen"),
    ("ddp", "parameter", "part.requires_grad = False", None)], ids=["fsdp", "zero3", "others", "all"])
def test_lora_that_trains_nothing(train, strategy, kind, what, said):
    run = train(ADAPTER.replace("{kind}", kind).replace("{what}", what), strategy=strategy, max_steps=6, **LM)
    if said is None:
        with pytest.raises(shardnb.RunFailed, match="LoRA adapters are frozen, and so is the rest"): run.wait()
    else: assert any(said in w["message"] for w in warned(run.wait(), "lora"))


def test_a_healthy_run_is_left_alone(train):
    run = train(max_steps=24, tuning="lora", warmup_ratio=.1, **LM).wait()
    assert not len(run.warnings), run.warnings.message.tolist()
    _, phases, _ = phases_of(run)
    assert phases["starting"] > 0 and 0 < phases["first step"] < phases["training"]
