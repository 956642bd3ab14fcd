"""What `make test` runs, part by part, with the wall time of each and what it may take. `python tests/suite.py NAME...` runs only the parts named.

The budgets are for two cores, and their sum stays under 25 minutes; a part that takes twice its own fails. A slower machine says by how much: SHARDNB_TEST_PACE=2 has twice the time.
"""
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ENV = dict(os.environ, OMP_NUM_THREADS="1", PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
PACE = float(os.environ.get("SHARDNB_TEST_PACE", 1))
FAR = 2         # times a budget: other work on the machine explains less than this
TUTORIAL = 180   # seconds of each tutorial


def sh(*cmd): return subprocess.run([str(c) for c in cmd], cwd=ROOT, env=ENV).returncode


def digests():
    "Content of every notebook and exported module"
    files = [p for d, ext in (("nbs", "*.ipynb"), ("shardnb", "*.py")) for p in (ROOT / d).rglob(ext) if ".ipynb_checkpoints" not in p.parts]
    return {str(p.relative_to(ROOT)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def export():
    "Exporting and cleaning must change nothing: what lies in shardnb/ is what the notebooks say"
    before = digests()
    code = sh(BIN / "nbdev-export") or sh(BIN / "nbdev-clean")
    after = digests()
    changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    for n in changed: print(f"not as exported or cleaned: {n}")
    if changed: sh("git", "--no-pager", "diff", "--stat", "--", "nbs", "shardnb")
    return code or int(bool(changed))


def lint(): return sh(BIN / "ruff", "check", ".")


def slow_tutorials(lines):
    "Of what `nbdev-test --timing` says those tutorials that took longer than they may"
    names = {p.name for p in (ROOT / "nbs" / "tutorials").glob("*.ipynb")}
    found = [m for line in lines if (m := re.match(r"(\S+\.ipynb): (\d+) secs", line))]
    return [f"{m[1]}: {m[2]} of {TUTORIAL * PACE:.0f} s" for m in found if m[1] in names and int(m[2]) > TUTORIAL * PACE]


def notebooks():
    "Every notebook, two at a time"
    with tempfile.TemporaryFile("w+") as out:   # not a pipe: whatever a notebook leaves running would keep that open
        code = subprocess.run([BIN / "nbdev-test", "--n-workers", "2", "--timing"], cwd=ROOT, env=ENV, stdout=out, text=True).returncode
        out.seek(0)
        told = out.read()
    print(told, end="", flush=True)
    slow = slow_tutorials(told.splitlines())
    for s in slow: print(f"a tutorial that takes too long: {s}")
    return code or int(bool(slow))


def tests(): return sh(sys.executable, "-m", "pytest", "-m", "not slow and not gpu", "--durations", "8", "tests")


# part -> (what runs it, seconds it may take); pytest last: its closing line sums up
PARTS = dict(export=(export, 12), lint=(lint, 3), notebooks=(notebooks, 400), tests=(tests, 1080))

if __name__ == "__main__":
    names, failed = sys.argv[1:] or list(PARTS), []
    ENV["SHARDNB_HOME"] = home = tempfile.mkdtemp(prefix="shardnb-test-")   # notebooks and tests start hundreds of runs
    for name in names:
        run, budget = PARTS[name][0], PARTS[name][1] * PACE
        print(f"== {name} (may take {budget:.0f} s)", flush=True)
        t = time.monotonic()
        code = run()
        took = time.monotonic() - t
        state = "failed" if code else "too slow" if took > max(FAR * budget, budget + 30) else "ok, over its budget" if took > budget else "ok"
        if state in ("failed", "too slow"): failed.append(name)
        if name != "tests" or failed or state != "ok": print(f"== {name}: {state}, {took:.0f} of {budget:.0f} s", flush=True)
    if failed: sys.exit(f"make test failed in: {', '.join(failed)} (its runs are kept in {home})")
    shutil.rmtree(home, ignore_errors=True)
