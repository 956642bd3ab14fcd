"""Checkpoints under stress, on the shipped ranks: killed while they save, on disks that fill up, and resumed bit for bit.

`SHARDNB_SEED` repeats a test's random choices; they are printed when it fails.
"""
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import ranks
from marks import slow
from unruly import warned
from waiting import within

from shardnb.plan.problem import RecipeError
from shardnb.plan.recipe import Recipe
from shardnb.run.checkpoint import Checkpoint, checkpoints_in
from shardnb.run.handle import Run

CONFIG = ranks.LLAMA | dict(vocab_size=512, intermediate_size=128, attention_dropout=.1)
FULL = ("ddp", "zero2", "zero3", "fsdp")


LORA = dict(tuning="lora", lora_r=4, lora_dropout=.1)


@pytest.fixture(scope="module")
def top(tmp_path_factory):
    "A model with dropout, and 10 rows: 3 steps of 4 rows in an epoch, the last one filled up"
    top = tmp_path_factory.mktemp("checkpoint")
    ranks.model_folder(top / "model", CONFIG)
    ranks.rows_file(top, ranks.counting(range(1, 11)))
    return top


@pytest.fixture
def rng(request):
    seed = int(os.environ.get("SHARDNB_SEED") or random.SystemRandom().randrange(10**6))
    print(f"SHARDNB_SEED={seed}")
    return random.Random(f"{seed} {request.node.name}")


def recipe(top, strategy, **kw):
    return Recipe(**dict(model=str(top / "model"), dataset=str(top / "rows.jsonl"), strategy=strategy, nproc=2, max_steps=6, micro_batch=1, grad_accum=2, max_length=64, precision="fp32",
                         save_total_limit=3) | kw)


@pytest.fixture(scope="module")
def losses(top):
    "Losses of a run that nobody disturbed, each made once"
    known = {}
    def of(*args, **kw):
        key = json.dumps([args, kw], sort_keys=True)
        if key not in known: known[key] = ranks.train(recipe(top, *args, **kw), home=top / "home").metrics.loss.tolist()
        return known[key]
    return of


def while_alive(found, alive, timeout=90, every=.001):
    "What `found()` gives as soon as it is something, or when no rank is left"
    over = lambda: not alive() and (found(),)
    got, = within(timeout, every)(lambda: (it,) if (it := found()) else over())
    return got


def alive_of(pids): return lambda: any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid in pids.values())


def kill(pids, rng):
    "All at once, or one rank and the others a little later"
    order = list(pids.values())
    rng.shuffle(order)
    for pid in order:
        os.kill(pid, signal.SIGKILL)
        if rng.random() < .5: time.sleep(rng.random() * .05)


def killed_in_a_save(recipe, at, rng, home, share=.8, **plan):
    "Kill the ranks while they save step `at`, in the first part `share` of it; returns (run, where it hit); 'too late' is after they have told of it"
    run, pids = ranks.start(recipe, home=home, **plan)
    part, told = Path(recipe.output_dir) / f".checkpoint-{at}.part", lambda: any(e["step"] == at for e in run.events("checkpoint"))
    seen = while_alive(lambda: part.exists() or told(), alive_of(pids))   # a save may be over between two looks
    assert seen, run.logs()[-3000:] + "".join(p.read_text() for p in run.rundir.errors_path.iterdir())
    took = [e["seconds"] for e in run.events("phase", 0) if e["phase"] == "saving" and e["state"] == "end"]
    time.sleep(rng.random() * share * (took[-1] if took else .1))
    kill(pids, rng)
    assert ranks.wait(pids, 10) == []
    inside = part / part.name[1:-5]
    if told(): return run, "too late"
    return run, "while writing" if inside.exists() and not (inside / "shardnb.json").exists() else "while sealing" if inside.exists() else "named, not told"


def go_on(recipe, home):
    "Resume from the newest complete checkpoint of a folder; returns (run, its step)"
    newest = [c for c in checkpoints_in(recipe.output_dir) if c.resumable][-1]
    run = ranks.train(recipe, home=home, resume_from=str(newest.path), resumed="x")
    return run, newest.step


def no_leftovers(folder): return sorted(p.name for p in Path(folder).iterdir() if p.name.startswith(".")) == []


@pytest.mark.parametrize("strategy", [s if s == "fsdp" else slow(s) for s in FULL])
def test_killed_while_it_saves_and_resumed_bit_for_bit(top, losses, rng, tmp_path, strategy):
    "in the middle of an epoch, of accumulation and of a schedule, with dropout"
    for attempt in range(5):  # on a busy machine the kill may come when the save is over
        out = tmp_path / f"out{attempt}"
        r = recipe(top, strategy, save_steps=2, output_dir=str(out))
        run, where = killed_in_a_save(r, 4, rng, tmp_path / "home", share=.8 - .2 * attempt)
        if where != "too late": break
    assert where != "too late"
    there = [(c.step, c.complete) for c in checkpoints_in(r.output_dir)]
    assert there in ([(2, True)], [(2, True), (4, True)]), where
    assert [c.step for c in run.checkpoints if c.complete] == [s for s, _ in there]
    rest, step = go_on(r, tmp_path / "home")
    assert run.metrics.loss.tolist()[:step] + rest.metrics.loss.tolist() == losses(strategy), where
    assert [c.step for c in checkpoints_in(r.output_dir) if c.complete] == [2, 4, 6] and no_leftovers(r.output_dir)
    assert Checkpoint.of(out / "final").complete


def stopped_and_resumed(recipe, home, after):
    "Stop a run after so many steps, when it can hear it, and resume it; returns (losses of both, step it stopped at)"
    for k in (after, 0): # quick steps may be over before anybody asks; a wish that is there from the start is heard in any case
        run, pids = ranks.start(recipe, home=home)
        while_alive(lambda run=run, k=k: len(run.events("step", 0)) >= k, alive_of(pids))
        run.rundir.request_stop()
        assert ranks.wait(pids) == []
        ends = {(e["state"], e["step"]) for e in run.events("end")}
        assert len(ends) == 1 and len(run.events("end")) == 2, ends # the ranks have agreed
        state, step = ends.pop()
        if state == "stopped": break
    assert state == "stopped" and step < recipe.max_steps
    newest = [c for c in run.checkpoints if c.resumable][-1]
    assert (newest.step, newest.strategy, newest.world_size, newest.run) == (step, recipe.strategy, 2, run.id)
    rest = ranks.train(recipe, home=home, resume_from=str(newest.path))
    return run.metrics.loss.tolist() + rest.metrics.loss.tolist(), step


@pytest.mark.parametrize("strategy", (slow("zero3"), "fsdp"))
def test_lora_stopped_and_resumed_bit_for_bit(top, losses, rng, tmp_path, strategy):
    got, step = stopped_and_resumed(recipe(top, strategy, **LORA), tmp_path, rng.randrange(2))
    assert got == losses(strategy, **LORA), f"stopped at {step}"


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ("full", "lora"))
@pytest.mark.parametrize("strategy", FULL)
def test_stopped_at_any_step_and_resumed_bit_for_bit(top, losses, rng, tmp_path, strategy, tuning):
    kw = dict(max_steps=24, lr_scheduler_type="cosine") | (LORA if tuning == "lora" else {})
    got, step = stopped_and_resumed(recipe(top, strategy, **kw), tmp_path, rng.randrange(1, 14))
    assert got == losses(strategy, **kw), f"stopped at {step}"
    print(f"\n{strategy}, {tuning}: stopped at {step} of 24, resumed, equal")


def test_a_trainer_of_the_cell_resumes_inside_its_second_epoch(top, tmp_path):
    "Its rows are shuffled by Transformers' own sampler, which Accelerate doesn't reach when it skips batches; and it keeps the best checkpoint besides the newest"
    cell = ("from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
            "model = AutoModelForCausalLM.from_config(__import__('transformers').AutoConfig.from_pretrained(recipe.model))\n"
            "rows = [dict(input_ids=(t := [(i * j) % 500 for j in range(1, 9)]), labels=t, attention_mask=[1] * 8) for i in range(1, 13)]\n"
            "args = TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=6, logging_steps=1, save_steps=2, eval_strategy='steps',\n"
            "    eval_steps=2, save_total_limit=2, load_best_model_at_end=True, warmup_steps=2)\n"
            "trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)\n")
    r = Recipe(model=str(top / "model"), strategy="ddp", nproc=2, precision="fp32")
    whole = ranks.train(r, cell, home=tmp_path)
    rest = ranks.train(r, cell, home=tmp_path, resume_from=str(next(c.path for c in whole.checkpoints if c.step == 4)))
    assert len(set(whole.metrics.loss)) == 6 and rest.metrics.loss.tolist() == whole.metrics.loss.tolist()[4:]
    state = json.loads((whole.rundir.checkpoints_path / "checkpoint-6" / "trainer_state.json").read_text())
    best = min(whole.events("eval"), key=lambda e: e["loss"])["step"]
    assert state["best_model_checkpoint"] == str(whole.rundir.checkpoints_path / f"checkpoint-{best}") and Checkpoint.of(state["best_model_checkpoint"]).complete


ONLY = dict(save_only_model=True)
WAYS = [("ddp", dict(nproc=1)), ("ddp", ONLY), ("ddp", LORA), ("ddp", dict(tuning="qlora", lora_r=4)), ("ddp", dict(precision="bf16")), ("ddp", dict(precision="bf16-pure")),
        ("zero1", {}), ("zero1", dict(precision="bf16")), ("zero2", LORA), ("zero2", ONLY), ("zero2", dict(nproc=1)), ("zero2+optim-cpu", {}), ("zero3", ONLY), ("zero3", dict(precision="bf16")),
        ("zero3", dict(precision="bf16-pure")), ("zero3+optim-cpu+param-cpu", {}), ("zero3", dict(nproc=1)), ("zero3", dict(tuning="qlora", lora_r=4)), ("fsdp", ONLY), ("fsdp", ONLY | LORA),
        ("fsdp", dict(fsdp_config=dict(state_dict_type="FULL_STATE_DICT"))), ("fsdp", dict(nproc=1)), ("fsdp", dict(precision="bf16", fp32_norms=True)), ("fsdp-grad-op", {}), ("fsdp+param-cpu", {}),
        ("fsdp", dict(tuning="qlora", lora_r=4))]


@pytest.mark.slow
@pytest.mark.parametrize("strategy, kw", WAYS, ids=["-".join([s, *(f"{k}={v}" for k, v in kw.items())]) for s, kw in WAYS])
def test_what_every_way_to_train_saves_is_found_whole(top, tmp_path, strategy, kw):
    "No false alarm, and no resume that fails; the room that a first save is thought to take is what it takes"
    r = recipe(top, strategy, **dict(max_steps=2, save_steps=1) | kw)
    run = ranks.train(r, home=tmp_path)
    assert run.events("warning") == [] and [(c.path.name, c.complete) for c in run.checkpoints] == [("checkpoint-1", True), ("checkpoint-2", True), ("final", True)]
    model_only = kw.get("save_only_model", False)
    assert [c.resumable for c in run.checkpoints] == [not model_only, not model_only, False]
    if not model_only: assert len(ranks.train(r, home=tmp_path, resume_from=str(run.checkpoints[0].path)).metrics) == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", FULL)
def test_four_ranks_resume_within_a_millionth(top, tmp_path, strategy):
    r = recipe(top, strategy, nproc=4, save_steps=4)
    whole = ranks.train(r, home=tmp_path, timeout=300)
    rest = ranks.train(r, home=tmp_path, timeout=300, resume_from=str(next(c.path for c in whole.checkpoints if c.step == 4)))
    assert rest.metrics.loss.tolist() == pytest.approx(whole.metrics.loss.tolist()[4:], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy, trials", [("ddp", 13), ("zero2", 12), ("zero3", 13), ("fsdp", 12)])
def test_kill_during_save_in_full(top, losses, rng, tmp_path, strategy, trials):
    "One training, killed in a save again and again, and resumed from what is complete: its losses are those of an undisturbed one"
    total = 4 * trials + 8
    r = recipe(top, strategy, max_steps=total, save_steps=1, save_total_limit=2, output_dir=str(tmp_path / "out"))
    want, tally, from_, began = losses(strategy, max_steps=total), {}, None, time.monotonic()
    step = trial = 0
    while trial < trials:
        plan = dict(resume_from=str(from_.path), resumed="x") if from_ else {}
        run, where = killed_in_a_save(r, step + rng.choice((1, 2)) if from_ else 2, rng, tmp_path / "home", **plan)
        got = run.metrics.loss.tolist()
        assert got == want[step:step + len(got)], f"trial {trial}, {where}"
        there = checkpoints_in(r.output_dir)
        trial += where != "too late"
        tally[where] = tally.get(where, 0) + 1
        if not there: continue
        assert all(c.complete and c.resumable for c in there) and len(there) <= 3, f"trial {trial}, {where}: {there}"
        assert there[-1].step >= step
        from_, step = there[-1], there[-1].step
    run = ranks.train(r, home=tmp_path / "home", resume_from=str(from_.path), resumed="x")
    assert run.metrics.loss.tolist() == want[step:] and no_leftovers(r.output_dir)
    print(f"\n{strategy}: {trials} of {trials} kills during a save, the newest complete checkpoint loaded and resumed each time ({tally}), {time.monotonic() - began:.0f} s")


# disks

@pytest.mark.parametrize("strategy", (slow("ddp"), slow("zero3"), "fsdp"))
def test_a_disk_that_fills_in_the_middle_of_a_save_leaves_the_run_alive(top, losses, rng, tmp_path, disk, strategy):
    "Bytes are free but no more files can be made, which nobody can foresee; then the disk is read-only; then all is well"
    place = disk(size="64m", nr_inodes=rng.randrange(6, 12))
    constant = dict(lr_scheduler_type="constant")  # so that losses don't depend on a length that nobody waits for
    r = recipe(top, strategy, max_steps=5000, save_steps=1, output_dir=str(place / "out"), **constant)
    run, pids = ranks.start(r, home=tmp_path / "home")
    alive = alive_of(pids)
    told = while_alive(lambda: warned(run, "disk"), alive)
    assert told and alive(), run.logs()[-3000:]
    assert "was not saved: the disk of" in told[0]["message"] and "became full while it was written" in told[0]["message"] and "The run goes on. It has no checkpoint yet" in told[0]["message"]
    assert "free space" in told[0]["fix"] and told[0]["step"] == 1
    disk(ro=True)
    told = while_alive(lambda: warned(run, "checkpoint"), alive)
    assert told and alive() and "could not write to" in told[0]["message"], run.logs()[-3000:]
    disk(rw=True, nr_inodes=1000)
    saved = while_alive(lambda: run.events("checkpoint"), alive)
    said = while_alive(lambda: [e for e in run.events("note") if f"the checkpoint of step {saved[0]['step']} is saved; since" in e["message"]], alive)
    assert len(said) == 1 and len(run.events("warning")) == 2  # each said once
    run.rundir.request_stop()
    assert ranks.wait(pids) == [] and saved, run.logs()[-3000:]
    assert {e["state"] for e in run.events("end")} == {"stopped"}
    last = run.events("end")[0]["step"]
    assert [c.step for c in run.checkpoints if c.resumable][-1] == last and no_leftovers(r.output_dir)
    if strategy == "ddp": assert run.metrics.loss.tolist()[:40] == losses(strategy, max_steps=40, **constant)[:last] # it went on as if nothing had been


@pytest.mark.parametrize("strategy", ("zero2", "fsdp"))
def test_one_rank_that_cannot_write_holds_up_nobody(top, tmp_path, strategy):
    "The system lets rank 1 write no file above 100 kB, as a quota of its own might; rank 0 writes everything"
    cell = "import resource, signal\nif rank == 1: signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    run = ranks.train(recipe(top, strategy, max_steps=3, save_steps=1), cell, home=tmp_path)
    only, = run.events("warning")
    assert only["topic"] == "checkpoint" and only["step"] == 1 and "rank 1 could not write to" in only["message"], only
    assert [(c.path.name, c.complete) for c in run.checkpoints] == [("final", True)] and len(run.metrics) == 3 and no_leftovers(run.rundir.checkpoints_path)


def test_a_disk_without_room_is_seen_before_the_save(top, tmp_path, disk):
    place = disk(size="2m")
    r = recipe(top, "zero2", max_steps=5000, save_steps=1, output_dir=str(place / "out"))
    run, pids = ranks.start(r, home=tmp_path / "home")
    alive = alive_of(pids)
    first, *_ = while_alive(lambda: warned(run, "disk"), alive)
    assert alive() and "it takes about 2.66 MiB" in first["message"] and "has 2 MiB free" in first["message"], first
    disk(size="6m")
    saved = while_alive(lambda: run.events("checkpoint"), alive)[0]["step"]
    told = while_alive(lambda: [e for e in warned(run, "disk") if e["step"] > saved], alive)[0] # there is room for one, not for two
    assert f"Its newest complete checkpoint is that of step {saved}" in told["message"]
    kept = next(c for c in run.checkpoints if c.step == saved)
    assert kept.resumable and kept.bytes == pytest.approx(2.77 * 2**20, rel=.02)
    run.rundir.request_stop()
    assert ranks.wait(pids) == []
    error = json.loads(run.rundir.error_path(0).read_text()) # asked to save and stop, it can't do both
    assert error["type"] == "SaveFailed" and "was asked to stop" in error["message"] and f"that of step {saved}" in error["message"]
    assert next(c for c in run.checkpoints if c.step == saved).resumable and no_leftovers(r.output_dir)


def test_a_final_model_that_has_no_room_names_the_disk(top, tmp_path, disk):
    place = disk(size="300k")
    run, pids = ranks.start(recipe(top, "fsdp", max_steps=2, output_dir=str(place / "out")), home=tmp_path / "home")
    assert ranks.wait(pids) == []
    error = json.loads(run.rundir.error_path(0).read_text())
    assert error["type"] == "SaveFailed" and "the final model was not saved: the disk of" in error["message"] and "300 KiB are free" in error["message"]
    assert run.checkpoints == [] and not list((place / "out").glob("*"))


def test_a_folder_that_cannot_be_written_to_is_found_before_the_launch(top, tmp_path, disk, monkeypatch):
    import shardnb
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path / "home"))
    disk(size="1m")
    place = disk(ro=True)
    with pytest.raises(RecipeError, match="output_dir: .*can't be written to: Read-only file system"): shardnb.train(recipe(top, "ddp", output_dir=str(place / "out")))
    disk(rw=True)
    big = recipe(top, "ddp", output_dir=str(place / "out"), save_steps=2)
    with pytest.raises(RecipeError, match="output_dir: .*[0-9] [KM]iB free, and at least [0-9.]+ MiB will be written"): shardnb.train(big)
    assert not (tmp_path / "home" / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", FULL)
def test_somebody_fills_the_disk_while_ranks_save(top, rng, tmp_path, disk, strategy):
    "A file takes all that is free as soon as a save begins"
    place = disk(size="40m")
    r = recipe(top, strategy, max_steps=5000, save_steps=1, output_dir=str(place / "out"))
    run, pids = ranks.start(r, home=tmp_path / "home")
    alive, hits = alive_of(pids), []
    while len(hits) < 5:
        before = len(warned(run, "disk"))
        while_alive(lambda: [p for p in (place / "out").glob(".checkpoint-*.part")], alive)
        time.sleep(rng.random() * .05)
        spare = rng.randrange(0, 2**20)
        with (place / "ballast").open("wb") as f:
            while (free := shutil.disk_usage(place).free) > spare:
                try: os.posix_fallocate(f.fileno(), f.seek(0, 2), free - spare)
                except OSError as e: assert e.errno == 28 # the ranks were quicker; then nothing was taken
        while_alive(lambda before=before: len(warned(run, "disk")) > before, alive)
        assert alive(), [run.events("end"), run.logs()[-3000:]]
        hits.append("became full" in warned(run, "disk")[-1]["message"])
        saved = len(run.events("checkpoint"))
        (place / "ballast").unlink()
        while_alive(lambda saved=saved: len(run.events("checkpoint")) > saved, alive)
        assert all(c.complete for c in checkpoints_in(r.output_dir))
    run.rundir.request_stop()
    assert ranks.wait(pids) == [] and {e["state"] for e in run.events("end")} == {"stopped"}
    print(f"\n{strategy}: the disk filled 5 times, {sum(hits)} in the middle of a save; the run went on each time")


# from the notebook and the terminal

def test_a_killed_run_is_resumed_from_the_terminal(top, losses, rng, tmp_path, monkeypatch, capsys):
    "with the real launcher"
    import shardnb
    from shardnb.ui.cli import main
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    for _ in range(5): # a quick run may be over before the kill comes
        run = shardnb.train(recipe(top, "ddp", save_steps=2))
        part = run.rundir.checkpoints_path / ".checkpoint-4.part"
        while_alive(part.exists, lambda run=run: not run.ended, every=.0002)
        time.sleep(rng.random() * .02)
        run.kill()
        step = max(c.step for c in run.checkpoints if c.resumable)
        if step < 6: break
    assert step in (2, 4), run.error
    assert main(["resume", run.id, "--save-steps", "1"]) == 0 and "saved: " in capsys.readouterr().out
    again = shardnb.attach(shardnb.runs().id[0])
    assert (again.plan["resumed"], again.recipe.save_steps, again.state) == (run.id, 1, "done")
    assert run.metrics.loss.tolist()[:step] + again.metrics.loss.tolist() == losses("ddp")
    assert no_leftovers(run.rundir.checkpoints_path) and [c.step for c in again.checkpoints if c.resumable][-1] == 6
    assert main(["resume", again.id]) == 2 and "the checkpoint is of step 6 already; give a larger max_steps" in capsys.readouterr().err


def test_resume_on_a_line_of_the_notebook(tmp_path, monkeypatch):
    from shardnb.run.rundir import RunDir
    from shardnb.ui.magics import ShardMagics, complete_line
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    rd = RunDir.create("model: tiny\nstrategy: ddp\nnproc: 2\nmicro_batch: 1\ngrad_accum: 4\nglobal_batch: 8\n", plan=dict(strategy="ddp", nproc=2, world_size=2))
    assert complete_line("%shardtrain --resume 2")[1] == [rd.id] and complete_line("%shardtrain --re")[1][-1] == "--resume"
    (rd.exit_path).write_text(json.dumps(dict(v=1, state="stopped", error=None)))
    magics = ShardMagics()
    with pytest.raises(RecipeError, match="has no complete checkpoint; set save_steps"): magics.shardtrain(f"--resume {rd.id[:10]}")
    with pytest.raises(RecipeError, match="goes on with the cell and the recipe that the run had"): magics.shardtrain(f"--resume {rd.id}", "x = 1")
    with pytest.raises(RecipeError, match="2 problems\n(.|\n)*the 8 rows of a step can't be dealt out evenly to 3 ranks(.|\n)*has no complete checkpoint"): magics.shardtrain(f"--resume {rd.id} --strategy zero3 --nproc 3")
    with pytest.raises(LookupError, match="no run 'zz'"): magics.shardtrain("--resume zz")

def test_a_run_goes_on_from_what_it_was_resumed_from(tmp_path, top):
    "A resumed run that was killed before its first save has no checkpoint of its own"
    from shardnb.run.checkpoint import whole_folder
    from shardnb.run.checkpoint import newest_of
    from shardnb.run.start import _to_go_on_from
    from shardnb.run.rundir import RunDir
    with whole_folder(tmp_path / "old" / "checkpoint-3", 3, strategy="ddp", world_size=2, run="old") as part:
        for n in ("trainer_state.json", "rng_state_0.pth"): (part / n).write_text("{}")
    run = Run(RunDir.create(recipe(top, "ddp"), plan=dict(strategy="ddp", world_size=2, nproc=2, resume_from=str(tmp_path / "old" / "checkpoint-3")), home=tmp_path / "home"))
    assert run.checkpoints == [] and newest_of(_to_go_on_from(run)).step == 3
