"Fixtures of the browser tests"
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import lab as lab_module  # noqa: E402


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
