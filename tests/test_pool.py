"""The pool of imports: children are warm, never old, this user's alone, and a start without it works and says why."""
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from unruly import ended, stepping, tell, until

from shardnb.run import pool
from shardnb.run.process import alive, clean_env, proc_id
from shardnb.run.rundir import read_json

LONG = 150  # s at most for what takes seconds: a busy machine imports slowly
RANKS = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder():
    "A pool of this module's own, in a folder with a short name: a socket's path may have 107 bytes"
    with tempfile.TemporaryDirectory(prefix="p") as top, pytest.MonkeyPatch.context() as m:
        m.setenv("XDG_RUNTIME_DIR", top)
        m.delenv("SHARDNB_POOL", raising=False)
        yield Path(top)
        pool.dismiss()
        until(lambda: not pool.pools(), LONG)


def said(tmp_path, code, name="said", env=(), **kw):
    "What a module prints that is run in a child of the pool"
    (tmp_path / f"{name}.py").write_text(code)
    out = tmp_path / f"{name}.txt"
    with out.open("w") as f: child = pool.fork(name, env=RANKS | {"PYTHONPATH": str(tmp_path)} | dict(env), fds=(0, f.fileno(), f.fileno()), **kw)
    while alive(child): time.sleep(.01)
    return out.read_text()


def test_a_child_is_warm_and_like_new(folder, tmp_path):
    said(tmp_path, "1")  # fills the pool
    code = """import os, random, signal, sys, threading
import numpy, torch
print(os.environ.get("SHARDNB_START"), len(os.listdir("/proc/self/task")), torch.get_num_threads(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, os.getsid(0) == os.getpid(),
      sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:3], os.environ["MINE"], sys.argv, __name__, numpy.random.rand(), random.random(), torch.cuda.is_initialized())"""
    began = time.time()
    a = said(tmp_path, code, "first", {"MINE": "1", "OMP_NUM_THREADS": "2"}).split()
    assert time.time() - began < 2
    b = said(tmp_path, code, "second", {"MINE": "2"}).split()
    assert a[2:9] == ["2", "True", "True", "[0,", "1,", "2]", "1"] and b[:3] == ["warm", "1", "1"] and b[8] == "2"
    assert "first.py" in a[9] and a[10] == "__main__" and a[11] != b[11] and a[12] != b[12] and a[-1] == "False"


SCANNED = """from shardnb.run.pool import scanned_once
from transformers.utils import import_utils as u
scan = u.define_import_structure
with scanned_once(): import transformers.models as given
assert scan.cache_info().misses == 1, "the files were read again"
assert u.define_import_structure is scan
read = u._LazyModule(given.__name__, given.__file__, scan(given.__file__))
assert scan.cache_info().misses == 2
left = {k for k in vars(read) if vars(read)[k] != vars(given).get(k)}
assert left == {"__spec__"}, left
assert {*dir(read)} == {*dir(given)} and "llama" in dir(given)
"""


def test_transformers_has_the_same_models_without_reading_their_files_again():
    done = subprocess.run([sys.executable, "-c", SCANNED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


LISTED = """from importlib import metadata
from shardnb.run.pool import asked_by_name
real = metadata.packages_distributions
def listed():
    asked.append(1)
    return real()
asked, metadata.packages_distributions = [], listed
with asked_by_name(): import trl
assert metadata.packages_distributions is listed and not asked, "every file was listed"
from trl.import_utils import PACKAGE_DISTRIBUTION_MAPPING as given
told = real()
assert {n: given[n] for n in ("torch", "peft", "transformers")} == {n: told[n] for n in ("torch", "peft", "transformers")} and not asked
assert given["yaml"] == told["yaml"] == ["PyYAML"] and "nothing" not in given and {**given} == told and asked == [1]
"""


def test_trl_finds_versions_without_listing_every_file():
    done = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_pool_serves_all_processes_of_a_user(folder, tmp_path):
    before = pool.pools()
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_pool import *; print(said(Path({str(tmp_path)!r}), 'print(7)'))"
    done = [subprocess.Popen([sys.executable, "-c", code.replace("'print(7)'", f"'print(7)', 'said{i}'")], stdout=subprocess.PIPE, text=True) for i in range(2)]
    assert [p.communicate()[0].strip() for p in done] == ["7", "7"]
    assert len(before) == 1 and [p["proc"] for p in pool.pools()] == [before[0]["proc"]]


def test_a_module_of_ones_own_is_never_old(folder, tmp_path):
    for word in ("old", "newer"):  # of another length: by its date, in whole seconds, Python may take its compiled file for that of the new text
        (tmp_path / "mine.py").write_text(f"word = {word!r}\n")
        assert said(tmp_path, "import mine; print(mine.word)") == f"{word}\n"


def test_a_loaded_file_that_changed_ends_the_pool(folder, tmp_path, monkeypatch):
    first = pool.pools()[0]["proc"]
    loaded = Path(pool.__file__).with_name("probe.py")
    before = loaded.stat()
    os.utime(loaded, ns=(before.st_atime_ns, before.st_mtime_ns + 1000))
    try:
        assert said(tmp_path, "import os; print(os.environ['SHARDNB_START'])").startswith("cold: first use")
        second = next(p["proc"] for p in pool.pools() if p["proc"] != first)
        assert second["pid"] != first["pid"]
    finally: os.utime(loaded, ns=(before.st_atime_ns, before.st_mtime_ns))
    out = said(tmp_path, "import os; print(os.environ['SHARDNB_START'])", retry=False)  # who can't wait gets a cold child from the old pool
    assert out.startswith("cold: ") and "probe.py has changed since it was imported" in out


def test_the_folder_is_the_users_alone(folder):
    said_dirs = [p for p in folder.rglob("*") if p.is_dir()]
    assert said_dirs and all(stat.S_IMODE(p.stat().st_mode) == 0o700 for p in said_dirs)
    with tempfile.TemporaryDirectory(prefix="p") as top, pytest.MonkeyPatch.context() as m:
        m.setenv("XDG_RUNTIME_DIR", top)
        Path(top, f"shardnb-pool-{os.getuid()}").mkdir(mode=0o755)
        with pytest.raises(pool.Cold, match="not this user's alone"): pool.fork("this", env=RANKS)


COMPUTE = """import time
until = time.process_time() + {0}
while time.process_time() < until: pass
"""
ENDED = """
print("done", flush=True)
time.sleep(60)"""
HANDED = f"""import subprocess, sys, time
for _ in range(3): subprocess.run([sys.executable, "-c", {COMPUTE!r}.format({{0}})])"""


@pytest.mark.parametrize("code, seconds, asked", [(COMPUTE, 1.5, False), (HANDED, .8, False), (COMPUTE, 60, True)], ids=["itself", "by children that end", "somebody asks"])
def test_imports_wait_while_a_child_that_needs_all_cores_is_busy_and_nobody_asks(code, seconds, asked):
    with tempfile.TemporaryDirectory(prefix="p") as top, socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as one:
        listener.bind(f"{top}/socket")
        listener.listen()
        p = pool.Pool(top, listener)
        with subprocess.Popen([sys.executable, "-c", code.format(seconds) + ENDED], stdout=subprocess.PIPE) as child:
            p.alone.append(child)
            if asked:
                one.connect(f"{top}/socket")
                one.sendall(b'{"module": "this"}\n')
            began = time.monotonic()
            pool._give_way(p)
            took, done = time.monotonic() - began, bool(select.select([child.stdout], [], [], 0)[0])
            child.kill()
        assert (len(p.waiting), done) == ((1, False) if asked else (0, True)) and took < pool.ALONE
        began = time.monotonic()
        pool._give_way(p)  # it has ended, or somebody waits
        assert time.monotonic() - began < 1
        for conn, _, _ in p.waiting: conn.close()


def answers(path):
    with socket.socket(socket.AF_UNIX) as s: return s.connect_ex(str(path)) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="takes two users, which only root can be")
def test_another_user_is_not_served(folder, tmp_path):
    said(tmp_path, "1")  # one pool at least
    sockets = [p for p in folder.glob("*/*/socket") if answers(p)]  # one that has ended may have left its own
    for p in (folder, *[q for s in sockets for q in (s.parent.parent, s.parent)]): p.chmod(0o755)  # as if the folders let them in
    for s in sockets: s.chmod(0o777)
    code = f"""import os, socket
os.setuid(65534)
s = socket.socket(socket.AF_UNIX); s.connect({str(sockets[0])!r})
try:
    s.sendall(b'{{"module": "this", "args": [], "env": {{}}, "cwd": "/", "retry": false, "asked": 0}}\\n')
    print("answer", s.makefile().read())
except ConnectionError: print("answer")"""
    try: done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    finally:
        for p in (folder, *[q for s in sockets for q in (s.parent.parent, s.parent)]): p.chmod(0o700)
    assert done.stdout.strip() == "answer" and any("belongs to user 65534" in p.read_text() for p in folder.glob("*/*/log")), done.stderr


def end_pools():
    "Kill them, and see that they are gone: the next start would ask one that is dying"
    mine = [p["proc"] for p in pool.pools()]
    for p in mine: os.kill(p["pid"], signal.SIGKILL)
    until(lambda: not any(map(alive, mine)), LONG)


def go(start, do="", steps=3): return start(do, steps=steps, env=RANKS | {"GLOO_SOCKET_IFNAME": "lo"})
def begin_of(run): return read_json(run.rundir.state_path)["start"]


def test_a_run_is_forked_and_leaves_nothing(folder, start):
    go(start, steps=1).wait(LONG)  # fills the pool, if the tests before have ended it
    run = go(start).wait(LONG)
    assert run.state == "done" and begin_of(run) == "warm" and len(run.events("start")) == 2
    assert not any(alive(p) for p in read_json(run.rundir.state_path)["ranks"].values())


@pytest.mark.parametrize("why", ["SHARDNB_POOL=0", "AF_UNIX path too long"])
def test_a_cold_start_works_and_says_why(folder, start, monkeypatch, tmp_path, why):
    if why[0] == "S": monkeypatch.setenv("SHARDNB_POOL", "0")
    else:
        long = tmp_path / ("x" * 90)
        long.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    run = go(start).wait(LONG)
    assert run.state == "done" and begin_of(run).startswith("cold: ") and why in begin_of(run)


def test_a_run_outlives_its_pool(folder, start):
    go(start, steps=1).wait(LONG)  # fills the pool
    run = stepping(go(start, "until_told()", steps=10), 3)
    assert begin_of(run) == "warm"
    end_pools()
    tell(run)
    assert ended(run, LONG)["state"] == "done"
    assert go(start).wait(LONG).state == "done" and pool.pools()


def test_killed_while_it_waits_for_the_imports(folder, start):
    end_pools()
    run = go(start)
    assert run.state == "starting" and begin_of(run) == "waiting for the imports"
    run.kill()
    assert run.state == "stopped"
    until(lambda: any(p["ready"] for p in pool.pools()), LONG)
    time.sleep(1)
    assert run.state == "stopped" and not run.events("start") and not run.pids


def test_key_and_tokens(folder):
    env = clean_env()
    assert pool.pool_dir(env | {"HF_TOKEN": "hf_secret"}) == pool.pool_dir(env) != pool.pool_dir(env | {"HF_HUB_OFFLINE": "other"})
    assert not any("hf_secret" in p.read_text(errors="replace") for p in folder.rglob("*") if p.is_file())
    assert json.loads(next(folder.glob("*/*/pool.json")).read_text())["python"] == sys.executable and proc_id()
