"JupyterLab on 127.0.0.1 with a token, and Chromium without a screen: what the browser tests stand on."
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
from ranks import free_port
from waiting import within

from shardnb.run.handle import Run
from shardnb.run.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = ROOT / "artifacts"
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync --disable-dev-shm-usage".split()
# No news prompt; every cell in the page, also those that are scrolled away; nothing saved behind the test's back
SETTINGS = {"@jupyterlab/apputils-extension/notification": '{"fetchNews": "false"}', "@jupyterlab/notebook-extension/tracker": '{"windowingMode": "none"}',
            "@jupyterlab/docmanager-extension/plugin": '{"autosave": false}', "@jupyterlab/extensionmanager-extension/plugin": '{"enabled": false}'}


def chromium():
    "The system's Chromium; playwright downloads none here"
    return next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)


class Lab:
    "A JupyterLab server over `root`, with settings and runtime files of its own below `home`"
    def __init__(self, root, home):
        self.port, self.token, home = free_port(), secrets.token_hex(16), Path(home)
        self.shardnb = home / "shardnb"   # where the kernels' runs live
        for name, text in SETTINGS.items():
            f = home / "cfg" / "lab" / "user-settings" / f"{name}.jupyterlab-settings"
            f.parent.mkdir(parents=True, exist_ok=True)
            f.write_text(text)
        env = dict(os.environ, HOME=str(home), JUPYTER_CONFIG_DIR=str(home / "cfg"), JUPYTER_RUNTIME_DIR=str(home / "run"), JUPYTER_DATA_DIR=str(home / "data"),
                   IPYTHONDIR=str(home / "ip"), JUPYTER_PREFER_ENV_PATH="1", SHARDNB_HOME=str(home / "shardnb"), JUPYTER_TOKEN=self.token,
                   XDG_CACHE_HOME=os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1",
                   PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        self.log = home / "lab.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen([sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={self.port}",
                                             "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}", "--LabApp.news_url=None", "--LabApp.extension_manager=readonly",
                                             "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"],
                                            env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        self._wait()

    def _wait(self):
        for _ in range(600):
            if self.process.poll() is not None: break
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api?token={self.token}", timeout=2)
                return
            except (urllib.error.URLError, OSError): time.sleep(.1)
        self.close()
        raise RuntimeError("JupyterLab did not come up:\n" + self.log.read_text()[-2000:])

    def end_runs(self):
        "End what a failed test has left: a run outlives its kernel and its server"
        for run in (Run(rd) for rd in RunDir.list(self.shardnb)): run.kill()

    def kernels(self):
        "Process ids of the kernels that run"
        return {p.pid for p in psutil.Process(self.process.pid).children()}

    def url(self, notebook): return f"http://127.0.0.1:{self.port}/lab/workspaces/t{secrets.token_hex(3)}/tree/{notebook}?reset&token={self.token}"

    def close(self):
        self.process.terminate()
        try: self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Page:
    "One notebook in the browser"
    def __init__(self, browser, lab, notebook, size=(1400, 1000)):
        self.errors, self.foreign, self.lab, self.file = [], [], lab, lab.root / notebook
        self.page = browser.new_page(viewport=dict(width=size[0], height=size[1]))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("request", lambda r: None if re.match(rf"(data:|blob:|(http|ws)://127\.0\.0\.1:{lab.port}/)", r.url) else self.foreign.append(r.url))
        self.page.goto(lab.url(notebook))
        self.idle()

    def idle(self, seconds=90): self.page.get_by_text(re.compile(r"Python 3 \(ipykernel\) \| Idle")).wait_for(timeout=seconds * 1000)

    def cell(self, i): return self.page.locator(".jp-Notebook .jp-Cell").nth(i)

    def run_cells(self, last):
        "Run the cells from the first to `last`, counted from 0"
        self.cell(0).click(position=dict(x=5, y=5))
        self.page.keyboard.press("Escape")
        for _ in range(last + 1): self.page.keyboard.press("Shift+Enter")

    def restart(self):
        "Restart the kernel, and say yes"
        self.page.keyboard.press("Escape")
        self.page.get_by_role("button", name="Restart the kernel").first.click()
        before = self.lab.kernels()
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        within(60)(lambda: self.lab.kernels() - before)   # until then the old one is idle
        self.idle()

    def save(self):
        "Save the notebook, and see that it is written"
        before = self.file.stat().st_mtime_ns
        self.page.keyboard.press("Control+s")
        within(30)(lambda: self.file.stat().st_mtime_ns > before)

    def shot(self, name):
        ARTIFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTIFACTS / f"{name}.png")
