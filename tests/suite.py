"What `make test` runs, part by part, with the wall time of each. `python tests/suite.py NAME...` runs only the parts named."
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ENV = dict(os.environ, OMP_NUM_THREADS="1", PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


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


def notebooks(): return sh(BIN / "nbdev-test", "--n-workers", "2", "--timing")


def tests(): return sh(sys.executable, "-m", "pytest", "-m", "not slow and not gpu", "--durations", "8", "tests")


PARTS = dict(export=export, lint=lint, notebooks=notebooks, tests=tests)   # pytest last: its closing line sums up

if __name__ == "__main__":
    names, failed = sys.argv[1:] or list(PARTS), []
    ENV["SHARDNB_HOME"] = home = tempfile.mkdtemp(prefix="shardnb-test-")   # notebooks and tests start hundreds of runs
    for name in names:
        print(f"== {name}", flush=True)
        t = time.monotonic()
        code = PARTS[name]()
        if code: failed.append(name)
        if name != "tests" or failed: print(f"== {name}: {'failed' if code else 'ok'}, {time.monotonic() - t:.0f} s", flush=True)
    if failed: sys.exit(f"make test failed in: {', '.join(failed)} (its runs are kept in {home})")
    shutil.rmtree(home, ignore_errors=True)
