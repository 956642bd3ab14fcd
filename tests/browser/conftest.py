"Fixtures of the browser tests, which come last; the site is built beside the tests before them"
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import lab as lab_module  # noqa: E402


BUILD = pytest.StashKey()  # (process, the folder with its log and the site)


def pytest_collection_modifyitems(items):
    "Browser tests come after the others, and what needs the site after all"
    turn = lambda path: 0 if path.parent.name == "tests" else 3 if path.name == "test_site.py" else 2 if path.parent.name == "browser" else 1
    items.sort(key=lambda item: turn(item.path))


def pytest_collection_finish(session):
    "Build it at the lowest priority, in the time that other tests spend waiting"
    if session.config.option.collectonly or shutil.which("npm") is None or not any(i.path.name == "test_site.py" for i in session.items): return
    top = Path(tempfile.mkdtemp(prefix="shardnb-site-"))
    with (top / "log").open("w") as log:
        p = subprocess.Popen([sys.executable, lab_module.ROOT / "docs" / "build.py", "--reuse", "--site", top / "site", "--work", top / "work"], stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    os.setpriority(os.PRIO_PROCESS, p.pid, 19)
    session.config.stash[BUILD] = p, top


def pytest_sessionfinish(session):
    if BUILD not in session.config.stash: return
    p, top = session.config.stash[BUILD]
    if p.poll() is None: os.killpg(p.pid, signal.SIGKILL)
    p.wait()
    shutil.rmtree(top, ignore_errors=True)


@pytest.fixture(scope="session")
def site(pytestconfig):
    "The site with the outputs that the notebooks hold; `make docs` runs them instead"
    if BUILD not in pytestconfig.stash: (pytest.fail if os.environ.get("CI") else pytest.skip)("no npm on this machine (Debian: apt-get install npm)")
    p, top = pytestconfig.stash[BUILD]
    assert p.wait(timeout=900) == 0, (top / "log").read_text()[-4000:]   # broken links and Sphinx's warnings end it too
    return top / "site"


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    path = lab_module.chromium()
    if path is None: (pytest.fail if os.environ.get("CI") else pytest.skip)("no Chromium on this machine (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as pw:
        b = pw.chromium.launch(executable_path=path, args=lab_module.FLAGS)
        yield b
        b.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    "A running JupyterLab whose root folder is a new one"
    root, home = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("lab")
    server = lab_module.Lab(root, home)
    server.root = root
    yield server
    server.end_runs()
    server.close()
