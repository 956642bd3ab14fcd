"What a start depends on besides the recipe: prompts, interrupts, the folder of runs, what is kept, the pool's half answers."
import json
import os
import socket
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from shardnb.plan.machine import Machine
from shardnb.plan.problem import RecipeError, ShardnbError
from shardnb.plan.recipe import Recipe
from shardnb.run import pool
from shardnb.run.checkpoint import Checkpoint, whole_folder
from shardnb.run.handle import Run
from shardnb.run.launch import LocalLauncher, Supervisor, rank_env
from shardnb.run.process import alive, clean_env, proc_id
from shardnb.run.rundir import RunDir, read_json, write_json

LAPTOP = Machine("a laptop", (), cores=2, host_bytes=16 * 2**30, disk_bytes=100 * 2**30)


def open_files(): return len(os.listdir("/proc/self/fd"))


# Planning

def test_a_prediction_is_kept_whatever_is_free_on_the_disk(tmp_path, monkeypatch):
    from shardnb.plan.strategy import Strategy
    from shardnb.run import planner
    monkeypatch.setenv("SHARDNB_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(planner.Planner, "get", lambda: SimpleNamespace(call=lambda what, **kw: asked.append(what) or {"breakdown": len(asked)}))
    r = Recipe(model="tiny", dataset="demo", nproc=2, max_steps=1, packing=True).resolve(2)
    answers = [planner._predicted(r, Strategy.parse("ddp"), 2, Machine.from_json({**LAPTOP.to_json(), "disk_bytes": n}))[0] for n in (1, 2)]
    assert asked == ["forecast"] and answers == [{"breakdown": 1}] * 2


def test_an_interrupt_before_the_answer_is_waited_for_ends_the_helper():
    "Else its answer would be taken for that of the next question"
    from shardnb.run.planner import Planner
    def interrupted(): raise KeyboardInterrupt
    p, ended = Planner(), []
    p._start, p._buf = lambda name: None, b""
    p._p = SimpleNamespace(stdin=SimpleNamespace(write=lambda data: None, flush=interrupted, close=lambda: None), stdout=SimpleNamespace(close=lambda: None), kill=lambda: ended.append(1), wait=lambda: None)
    with pytest.raises(KeyboardInterrupt): p.call("ping")
    assert ended and p._p is None


def test_a_setting_with_a_secret_s_value_is_refused_before_ranks_read_stars(tmp_path, monkeypatch):
    import shardnb
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.data.jsonl").write_text('{"text": "x"}\n')
    monkeypatch.setenv("S3_KEY", "rows.data.jsonl")
    with pytest.raises(RecipeError, match="dataset: holds what S3_KEY holds"): shardnb.train(dict(model="tiny", dataset="rows.data.jsonl", nproc=2, max_steps=1))
    assert not list(tmp_path.glob("home/runs/*/recipe.yaml"))


def test_the_driver_is_asked_once_for_what_is_built_in(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\necho '0, GPU-aa, NVIDIA A100-SXM4-80GB, 81920, 8.0'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = [len(Machine.detect().gpus) for _ in range(3)]
    assert found == [1] * 3 and (tmp_path / "asked").read_text().count("asked") == 2  # GPUs, and their bus


def test_nccl_listens_on_this_machine_alone(monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    env = lambda machine, **kw: rank_env(Recipe(model="tiny", dataset="demo", **kw), Machine.preset(machine), 2)
    assert env("4xA100")["NCCL_SOCKET_IFNAME"] == env("4xA100")["GLOO_SOCKET_IFNAME"] and "NCCL_SOCKET_IFNAME" not in env("cpu")
    assert env("4xA100", env={"NCCL_SOCKET_IFNAME": "ib0"})["NCCL_SOCKET_IFNAME"] == "ib0"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    assert "NCCL_SOCKET_IFNAME" not in env("4xA100")  # ranks inherit it


# Runs

def saved(rd, step=2):
    "A checkpoint that a run can go on from, as far as its files tell"
    with whole_folder(rd.checkpoints_path / f"checkpoint-{step}", step, strategy="ddp", world_size=2, run=rd.id) as part:
        for n in ("trainer_state.json", "rng_state_0.pth"): (part / n).write_text("{}")
    return rd.checkpoints_path / f"checkpoint-{step}"


def test_the_first_interrupt_is_a_stop_wherever_it_comes(tmp_path, capsys):
    rd = RunDir.create("model: tiny\n", plan={"strategy": "ddp", "nproc": 1}, home=tmp_path)
    write_json(rd.state_path, dict(state="running", supervisor=proc_id(), host=socket.gethostname(), heartbeat=time.time(), ranks={}))
    class Interrupted(Run):
        asked = 0
        @property
        def ended(self):
            Interrupted.asked += 1
            if Interrupted.asked == 1: raise KeyboardInterrupt
            if Interrupted.asked == 4: write_json(rd.exit_path, dict(state="stopped", error=None))
            return super().ended
    Interrupted.stop = Run.stop
    assert Interrupted(rd).wait(poll=.01).state == "stopped" and rd.stop_requested()["how"] == "graceful" and "Stopping" in capsys.readouterr().out


def test_a_resumed_run_stays_in_its_home_and_saves_as_little(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path / "default"))
    monkeypatch.setattr(LocalLauncher, "start", lambda self, rundir: None)
    text = Recipe(model="tiny", dataset="demo", strategy="ddp", nproc=2, global_batch=8).resolve(2).to_yaml()
    monkeypatch.setattr("shardnb.run.planner.plan_run", lambda recipe, cell: dict(recipe=recipe.resolve(2).to_yaml(), kind="recipe", facts=None, strategy="ddp", nproc=2, notes=[]))
    rd = RunDir.create(text, plan=dict(strategy="ddp", nproc=2, kind="recipe", keep_model=False, sample_prompts=["Why?"]), home=tmp_path / "other")
    saved(rd)
    write_json(rd.exit_path, dict(state="stopped", error=None))
    new = Run(rd).resume(seed=7)
    assert new.dir.parent == rd.path.parent and not (tmp_path / "default").exists()
    assert (new.plan["keep_model"], new.plan["sample_prompts"], new.plan["kin"]) == (False, ["Why?"], [rd.id])
    assert any("seed 7 (it had 42)" in n for n in new.plan["notes"])
    saved(new.rundir, 4)
    write_json(new.rundir.exit_path, dict(state="stopped", error=None))
    assert new.resume().plan["kin"] == [rd.id, new.id]


def test_a_checkpoint_that_somebody_else_may_have_written_is_not_tried(tmp_path):
    "Its pickles could run anything; a link may point to a file of anybody"
    rd = RunDir.create("model: tiny\n", plan={}, home=tmp_path)
    path = saved(rd)
    (tmp_path / "theirs").write_bytes(b"x")
    (path / "optimizer.pt").symlink_to(tmp_path / "theirs")
    with pytest.raises(ShardnbError, match="is a link: a checkpoint holds pickles"): Checkpoint.of(path).test()
    assert not (path / "shardnb-tested.json").exists()


# Processes

def test_a_step_of_the_clock_kills_nobody(monkeypatch):
    "The time of day at which a process began is reckoned from the clock: after an NTP step it is another one"
    me, was = proc_id(), psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: was(self) + 30)
    assert alive(json.loads(json.dumps(me)))
    assert not alive({"pid": me["pid"], "create_time": me["create_time"]})  # one that was written without its ticks


def test_a_clock_that_is_set_forward_ends_no_save(tmp_path, monkeypatch):
    "Nor a laptop that sleeps after Stop: the ranks' 120 s are those in which they could work"
    monkeypatch.delenv("SHARDNB_STOP_GRACE", raising=False)
    rd = RunDir.create("model: tiny\n", plan={"nproc": 2}, home=tmp_path)
    sup = Supervisor(rd, "no module")
    sup._obey(rd.request_stop() | {"t": time.time() - 125})
    assert sup.state == "stopping" and sup.note is None


def test_folders_beside_the_libraries_are_passed_on(tmp_path, monkeypatch):
    "A prefix is /usr for a system's Python, and not all below it is Python's own"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "share" / "mine").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "share" / "mine"))
    passed = clean_env()["PYTHONPATH"].split(os.pathsep)
    assert str(tmp_path / "share" / "mine") in passed and not any(p.endswith("site-packages") or os.path.exists(os.path.join(p, "argparse.py")) for p in passed)


# The pool

@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no pool")
def test_half_a_request_leaves_no_file_open(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener, open(os.devnull) as f:
        listener.bind("socket")
        listener.listen()
        p, before = pool.Pool(tmp_path, listener), open_files()
        for sent in (b'{"module": "this"', b"no JSON\n", b"[1]\n", b"{}\n"):
            with socket.socket(socket.AF_UNIX) as conn:
                conn.connect("socket")
                socket.send_fds(conn, [sent], [f.fileno()] * 3)
            assert pool._serve(p, 1)
        assert open_files() == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no pool")
def test_a_planner_doesn_t_wait_for_what_only_ranks_need(tmp_path, monkeypatch):
    "It is started in the first pause of the imports; who comes meanwhile with something else is served after them"
    monkeypatch.chdir(tmp_path)
    done, asked = [], []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        listener.listen()
        p = pool.Pool(tmp_path, listener)
        def ask(module):
            conn = socket.socket(socket.AF_UNIX)
            conn.connect("socket")
            socket.send_fds(conn, [json.dumps({"module": module}).encode() + b"\n"], [])
            asked.append(conn)
        def imports():
            ask("shardnb.run.launch"), ask(pool.EARLY)
            yield
            done.append("imported")
        monkeypatch.setattr(pool, "preload", imports)
        monkeypatch.setattr(pool, "_fork", lambda p, q, fds: done.append(q["module"]) or {})
        p.fill()
        assert done == [pool.EARLY, "imported"]
        assert pool._serve(p, 0) and done[-1] == "shardnb.run.launch" and not pool._serve(p, 0)
        assert [c.makefile().readline() for c in asked] == ["{}\n"] * 2
    for c in asked: c.close()


def test_half_an_answer_is_no_answer(monkeypatch):
    def connect(env):
        ours, theirs = socket.socketpair()
        theirs.sendall(b'{"pid": 7, "crea')
        theirs.shutdown(socket.SHUT_WR)
        kept.append(theirs)
        return ours
    kept = []
    monkeypatch.setattr(pool, "connect", connect)
    with pytest.raises(pool.Cold, match="the pool has ended"): pool.fork("this")
    assert len(kept) == 2
    for s in kept: s.close()


def test_an_interrupt_while_a_helper_is_started_leaves_no_pipe(monkeypatch):
    def interrupted(*_, **__): raise KeyboardInterrupt
    monkeypatch.setattr(pool, "fork", interrupted)
    before = open_files()
    with pytest.raises(KeyboardInterrupt): pool.popen("this", stderr=sys.__stderr__)
    assert open_files() == before


def test_a_package_that_is_installed_meanwhile_ends_the_pool(tmp_path, monkeypatch):
    "Transformers and PEFT look once for what they can use"
    (site := tmp_path / "site-packages").mkdir()
    monkeypatch.syspath_prepend(str(site))
    stamps = {f: t for f, t in pool._stamps().items() if f == str(site)}
    assert stamps and not pool.changed(stamps)
    (site / "bitsandbytes").mkdir()
    os.utime(site, ns=(1, stamps[str(site)] + 1))
    assert "packages were installed" in pool.changed(stamps)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no pool")
def test_a_supervisor_that_ends_before_its_first_word_loses_the_run(tmp_path, monkeypatch):
    "Else it would be starting for as long as the pool lives"
    def fork(*args, meet, **kw):
        meet(proc_id())   # the pool lives
        return {"pid": 2**22 + 1, "create_time": 0.}
    monkeypatch.setattr("shardnb.run.launch.fork", fork)
    monkeypatch.setattr("shardnb.run.state.STALE", -1)
    rd = RunDir.create("model: tiny\n", plan={"nproc": 2}, home=tmp_path)
    LocalLauncher().start(rd)
    assert Run(rd).state == "lost"


def test_a_run_that_waits_names_the_pool_it_waits_for(tmp_path, monkeypatch):
    "Another pool's life says nothing about it"
    seen = []
    def fork(*args, meet, **kw):
        meet({"pid": 2**22 + 1, "create_time": 0.})
        seen.append(read_json(rd.state_path)["pool"]["pid"])
    monkeypatch.setattr("shardnb.run.launch.fork", fork)
    rd = RunDir.create("model: tiny\n", plan={"strategy": "ddp", "nproc": 1}, home=tmp_path)
    assert LocalLauncher().start(rd) is None and seen == [2**22 + 1] and Run(rd).state == "starting"
    write_json(rd.state_path, read_json(rd.state_path) | {"heartbeat": time.time() - 60})
    monkeypatch.setattr("shardnb.run.pool.pools", lambda: [{"proc": proc_id()}])
    assert Run(rd).state == "lost"
