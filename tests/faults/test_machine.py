"Faults of the machine and of single ranks: the right words within the stated time, and nothing left behind."
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from unruly import ended, family, fill, gone, stepping, tell, until

from shardnb.plan.problem import ShardnbError
from shardnb.run.handle import Run
from shardnb.run.process import proc_id
from shardnb.run.registry import runs
from shardnb.run.rundir import RunDir, read_json, write_json

# A rank that fails, hangs or leaves

FAILS = [  # what one rank does at step 3, cause, words of the message
    ("os._exit(9)", "exit code 9", "rank 1 left with exit code 9"),
    ("os._exit(0)", "left early", "rank 1 left early, with exit code 0"),
    ("sys.exit(0)", "left early", "rank 1 left early, with exit code 0"),
    ("raise ValueError('a bad batch')", "ValueError", "a bad batch"),
    ("[0] * (1 << 62)", "MemoryError", "memory"),
    ("os.kill(os.getpid(), 11)", "SIGSEGV", "native code"),
]


@pytest.mark.parametrize("do, cause, words", FAILS, ids=[f[0] for f in FAILS])
def test_one_rank_goes_wrong(start, do, cause, words):
    "The others are in a collective that will never end; five seconds later nobody is"
    run = stepping(start("until_told(); " + do), 3)
    procs, t = family(run), time.monotonic()
    tell(run)
    end = ended(run, 10)
    assert time.monotonic() - t < 5.5
    assert end["state"] == run.state == "failed"
    assert (run.error.rank, run.error.cause, run.error.phase) == (1, cause, "training") and words in run.error.message
    assert end["survivors"] == [] and gone(procs)


def test_a_rank_that_leaves_while_the_others_don_t_need_it(start):
    "Rank 1 goes home with exit code 0 and rank 0 finishes by itself: this is no success"
    run = start("os._exit(0)", others="events.write('end', state='done', step=3); os._exit(0)", steps=3)
    assert ended(run)["state"] == "failed" and (run.error.rank, run.error.cause) == (1, "left early")


STUCK = [("a rank in barrier()", "dist.barrier()", "time.sleep(600)"), ("a rank in an endless loop", "while True: pass", ""),
         ("a rank that ignores SIGTERM", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)", "")]


@pytest.mark.parametrize("what, do, others", STUCK, ids=[s[0] for s in STUCK])
def test_a_stop_that_cannot_be_agreed_on(start, monkeypatch, what, do, others):
    "TERM after the grace, KILL ten seconds later; here the grace is a second and not two minutes"
    monkeypatch.setenv("SHARDNB_STOP_GRACE", "1")
    run = stepping(start(do, others=others), 3)
    procs, t = family(run), time.monotonic()
    run.stop()
    assert run.state == "stopping"
    end = ended(run, 20)
    took, deaf = time.monotonic() - t, "ignores" in what
    assert 1 <= took < (15 if deaf else 5)
    assert (end["state"], end["error"], end["survivors"]) == ("stopped", None, []) and end["forced"] in ("SIGTERM", "SIGKILL")
    assert "had not done so after 1 s" in run.note and "rank 1: training, step 3" in run.note and "what came after the last checkpoint is not saved" in run.note
    assert run.note in repr(run) and gone(procs)


def test_a_run_that_saves_gets_more_time(start, monkeypatch):
    "A checkpoint may take longer than the grace; a rank that says it is saving is waited for"
    monkeypatch.setenv("SHARDNB_STOP_GRACE", "0.3")
    run = stepping(start("while not told(): rundir.beat(rank, 'saving', step); time.sleep(.1)", rank=0), 3)
    until(lambda: read_json(run.rundir.heartbeat_path(0))["phase"] == "saving")
    run.stop()
    time.sleep(2)
    assert run.state == "stopping"
    tell(run)
    assert (ended(run)["state"], run.note) == ("stopped", None) and {e["state"] for e in run.events("end")} == {"stopped"}


def test_five_megabytes_on_stderr_of_each_rank(start):
    noise = "for _ in range(5120): os.write(2, b'x' * 1023 + b'\\n')"
    run = start(noise, others=noise, steps=5)
    assert ended(run)["state"] == "done"
    assert [run.rundir.log_path(r).stat().st_size >= 5 << 20 for r in (0, 1)] == [True, True]
    assert run.logs(0, tail=1) == "x" * 1023


# The machine

def test_the_usual_port_is_taken(start, monkeypatch):
    "29500 is in use, and the notebook's environment names it: ranks meet elsewhere, and on this machine's own address alone"
    with socket.socket() as s:
        try: s.bind(("127.0.0.1", 29500)), s.listen()
        except OSError: pass  # somebody has it already, which is just as well
        monkeypatch.setenv("MASTER_PORT", "29500"), monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        run = stepping(start())
        listening = [line.split()[1] for r in run.pids.values() for name in ("tcp", "tcp6") for line in Path(f"/proc/{r}/net/{name}").read_text().splitlines() if line.split()[3] == "0A"]
        port = {e["port"] for e in run.events("start")}
        assert len(port) == 1 and port != {"29500"}
        mine = [a for a in listening if int(a.rsplit(":", 1)[1], 16) == int(*port)]
        assert mine and set(mine) == {f"0100007F:{int(*port):04X}"}, mine
        run.stop()
        assert ended(run)["state"] == "stopped"


def test_no_socket_of_a_run_listens_to_the_network(start):
    import psutil
    run = stepping(start())
    seen = {c.laddr.ip for p in family(run) for c in psutil.Process(p["pid"]).net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert seen and seen <= {"127.0.0.1", "::1"}


def test_a_disk_that_is_full_from_the_start(disk, start):
    home = disk(size="1m")
    fill(home)
    with pytest.raises(ShardnbError, match="can't be written to .*No space left on device.*free some space"): start(home=home)
    assert RunDir.list(home) == [] and list((home / "runs").glob("2*")) == []


def test_a_disk_that_fills_up_and_is_freed(disk, start):
    "The run goes on, what it tells waits in memory, and nothing is lost"
    home = disk()
    run = stepping(start(home=home))
    ballast = fill(home)
    ballast.touch()
    told = lambda: len(run.events("step", rank=0))
    seen = told()
    until(lambda: (before := told()) and (time.sleep(.5), told())[1] == before and "full" in repr(run))   # nothing more comes
    held = told()
    assert run.state == "running" and held <= seen + 40  # what still fitted into the last block
    ballast.unlink()
    until(lambda: any("the disk was full for" in e["message"] for e in run.events("warning")))
    run.stop()
    assert ended(run)["state"] == "stopped"
    last = run.events("end", rank=0)[0]["step"]
    assert [e["step"] for e in run.events("step", rank=0)] == list(range(1, last + 1)) and last > held and all(r.bad == 0 for r in run._readers.values())


def test_a_stop_and_an_end_on_a_full_disk(disk, start):
    "The reserve has room for the last words"
    home = disk()
    run = stepping(start(home=home))
    procs = family(run)
    fill(home)
    run.stop()
    end = ended(run, 20)
    assert end["state"] in ("stopped", "failed") and end["survivors"] == [] and gone(procs)
    if end["state"] == "failed": assert "disk is full" in run.error.message
    assert not run.rundir.reserve_path.exists() and runs(home).iloc[0].state == end["state"]


def test_an_error_on_a_full_disk(disk, start):
    home = disk()
    run = stepping(start("until_told(); raise OSError(28, 'No space left on device')", home=home), 3)
    fill(home)
    tell(run)
    assert ended(run)["state"] == "failed"
    assert run.error.rank == 1 and "the disk is full" in run.error.message and "free space" in run.error.fix


@pytest.mark.parametrize("how", ["a file in the way", "read-only"])
def test_a_home_that_cannot_be_written(tmp_path, disk, start, how):
    if how == "read-only": home = disk("ro", ro=True)
    else: (home := tmp_path / "file").write_text("x")
    with pytest.raises(ShardnbError, match="SHARDNB_HOME: runs can't be written to .*set SHARDNB_HOME to a folder that can be"): start(home=home / "x")


NO_SHM = """
import sys, json, os
sys.path[:0] = sys.argv[1:3]
from unruly import ENV, ended, family, gone
from shardnb.run.handle import Run
from shardnb.run.launch import LocalLauncher
from shardnb.run.rundir import RunDir
do = "from torch.utils.data import DataLoader\\nlist(DataLoader(torch.zeros(4, 1 << 20), num_workers=1))"
rd = RunDir.create('model: tiny\\n', plan={'strategy': 'ddp', 'nproc': 1, 'env': ENV, 'test': {'do': do, 'rank': 0, 'steps': 5}})
LocalLauncher('unruly_worker').start(rd)
run = Run(rd)
end = ended(run)
print(json.dumps(dict(state=end['state'], message=run.error.message, fix=run.error.fix, gone=gone(family(run)))))
"""


def test_no_room_in_dev_shm(tmp_path):
    "A data loader's processes pass tensors through /dev/shm; a container gives it 64 MB"
    here = Path(__file__).parent
    env = dict(os.environ, SHARDNB_HOME=str(tmp_path), SHARDNB_POOL="0")  # a process outside has a /dev/shm of its own
    shell = "mount -t tmpfs -o size=64k tmpfs /dev/shm && exec \"$@\""
    if not shutil.which("unshare") or subprocess.run(["unshare", "-m", "sh", "-c", shell, "sh", "true"], capture_output=True).returncode: pytest.skip("needs a mount namespace (root)")
    p = subprocess.run(["unshare", "-m", "sh", "-c", shell, "sh", sys.executable, "-c", NO_SHM, str(here), str(here.parent)], env=env, capture_output=True, text=True, timeout=240)
    said = json.loads(p.stdout.splitlines()[-1])
    assert said["state"] == "failed" and "shared memory" in said["message"] and "dataloader_num_workers" in said["fix"] and said["gone"]


# Room for one more

def test_a_run_that_would_not_fit_is_warned_about(tmp_path, monkeypatch):
    "Another run of the registry is about to take most of the memory: said with figures and its name, and the run starts all the same"
    from shardnb.plan.memory import MemoryBreakdown
    from shardnb.run import start
    from shardnb.run.room import free_host
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path))
    started = []
    monkeypatch.setattr(start.LocalLauncher, "start", lambda self, rundir: started.append(rundir))
    plan = lambda n: dict(strategy="ddp", nproc=2, cuda=False, predicted=MemoryBreakdown({"params": int(n)}).to_json())
    other = RunDir.create("model: tiny\n", plan=plan(free_host() * .4))
    write_json(other.state_path, dict(state="starting", supervisor=proc_id(), ranks={}, host=socket.gethostname(), heartbeat=time.time()))
    with pytest.warns(UserWarning, match=rf"predicted to need .* GiB of host memory .*run {other.id} holds [\d.]+ (B|KiB|MiB) and is predicted to take .* GiB more"):
        run = start._start("model: tiny\n", None, plan(free_host() * .2), None)
    assert len(started) == 1 and any(other.id in n for n in run.plan["notes"])
    write_json(other.exit_path, dict(state="done", error=None))
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start._start("model: tiny\n", None, plan(1 << 20), None)


# The registry

def test_files_that_are_not_whole_cost_their_run_only(tmp_path):
    "After a power cut a file may be empty; the list of runs still shows the others"
    good, bad = (RunDir.create("model: tiny\n", plan={"strategy": s, "nproc": 1}, home=tmp_path) for s in ("ddp", "zero3"))
    write_json(good.exit_path, dict(state="done", error=None, summary={}))
    for p in (bad.exit_path, bad.state_path, bad.plan_path): p.write_text('{"state": "do')
    os.utime(bad.path, (1, 1))
    table = runs(tmp_path).set_index("id")
    assert table.loc[good.id].state == "done" and table.loc[bad.id].state == "lost"


CROWD = """
import sys
from shardnb.run.rundir import RunDir
from shardnb.run.registry import runs, attach
home, n = sys.argv[1], int(sys.argv[2])
mine = []
for i in range(n):
    rd = RunDir.create('model: tiny\\n', plan={'strategy': 'ddp', 'nproc': 1}, home=home)
    mine.append(rd.id)
    assert rd.id in set(runs(home)['id'])
    for r in RunDir.list(home): r.request_stop('kill' if i % 2 else 'graceful')
print(*mine)
"""


def test_three_notebooks_in_one_registry(tmp_path):
    "They start runs in the same second, list them and stop each other's: no name is given twice, nothing is half there"
    crowd = [subprocess.Popen([sys.executable, "-c", CROWD, str(tmp_path), "10"], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    ids = [p.communicate(timeout=240)[0].split() for p in crowd]
    assert [p.returncode for p in crowd] == [0] * 3
    flat = sum(ids, [])
    assert len(set(flat)) == 30 and {r.id for r in RunDir.list(tmp_path)} == set(flat)
    assert {r.stop_requested()["how"] for r in RunDir.list(tmp_path)} <= {"kill", "graceful"}


def test_a_kill_is_never_taken_back(tmp_path):
    rd = RunDir.create("model: tiny\n", plan={}, home=tmp_path)
    rd.request_stop("kill")
    assert rd.request_stop()["how"] == rd.stop_requested()["how"] == "kill"


def test_a_pid_that_was_given_to_another_process_is_never_signalled(tmp_path):
    from shardnb.run.launch import LocalLauncher
    from shardnb.run.process import alive, send
    p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        old = {"pid": p.pid, "create_time": proc_id(p.pid)["create_time"] - 3600}  # an hour ago this number was a rank's
        rd = RunDir.create("model: tiny\n", plan={"nproc": 1}, home=tmp_path)
        write_json(rd.state_path, dict(state="running", supervisor=old, ranks={"0": old}, host=socket.gethostname(), heartbeat=0, launched_at=0))
        assert not alive(old) and not send(old, signal.SIGKILL) and LocalLauncher().kill(rd, wait=.2) == []
        assert p.poll() is None and Run(rd).state == "stopped"
    finally: p.kill(), p.wait()


# With the rank that ships

def trained(tmp_path, monkeypatch, cell=None, **kw):
    "A run of the real worker that has ended"
    import shardnb
    monkeypatch.setenv("SHARDNB_HOME", str(tmp_path / "home"))
    run = shardnb.train(shardnb.Recipe(**dict(model="tiny", dataset="demo", strategy="ddp", nproc=2, micro_batch=1, grad_accum=1, max_length=64, max_steps=3) | kw), cell=cell)
    try: ended(run)
    finally:
        if not run.ended: run.kill()
    return run


def test_a_model_file_that_is_cut_off(tmp_path, monkeypatch):
    import numpy as np
    import ranks
    from safetensors.numpy import save_file
    folder = ranks.model_folder(tmp_path / "model", ranks.LLAMA | dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=260, tie_word_embeddings=True))
    file = Path(folder) / "model.safetensors"
    save_file({"model.embed_tokens.weight": np.zeros((260, 32), np.float32)}, file, metadata={"format": "pt"})
    file.write_bytes(file.read_bytes()[:-1000])
    try: run = trained(tmp_path, monkeypatch, model=folder)
    except ShardnbError as e: said = str(e)  # better still: found before the launch
    else:
        assert run.state == "failed" and run.error.phase == "loading" and gone(family(run))
        said = f"{run.error.message} {run.error.fix}"
    assert "model.safetensors" in said or "cut off" in said or "incomplete" in said.lower(), said


def test_a_cell_that_leaves_on_one_rank(tmp_path, monkeypatch):
    "`sys.exit(0)` in a cell is no success, and nobody waits for the time limit of a collective"
    run = trained(tmp_path, monkeypatch, cell="import sys\nif rank == 1: sys.exit(0)\ntrain_dataset = [{'text': 'a b c'}] * 8\n")
    assert run.state == "failed" and run.error.rank == 1 and run.error.cell_line == 2 and gone(family(run))
    assert "left early" in run.error.message and "sys.exit" in f"{run.error.message} {run.error.fix}", run.error
