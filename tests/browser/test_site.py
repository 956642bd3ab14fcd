"The docs site builds without a network, loads nothing from elsewhere, and every link in it leads somewhere."
import os
import shutil
import subprocess
import sys

import pytest
from lab import ARTIFACTS, ROOT

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "The site with the outputs that the notebooks hold; `make docs` runs them instead"
    if shutil.which("npm") is None: (pytest.fail if os.environ.get("CI") else pytest.skip)("no npm on this machine (Debian: apt-get install npm)")
    out = tmp_path_factory.mktemp("site")
    r = subprocess.run([sys.executable, ROOT / "docs" / "build.py", "--reuse", "--site", out], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert r.returncode == 0, (r.stdout + r.stderr)[-4000:]   # broken links and Sphinx's warnings end it too
    return out


def test_every_module_has_a_page(site):
    modules = {f"{p.parent.name}/{p.stem}" for p in (ROOT / "shardnb").rglob("*.py") if p.stem not in ("__init__", "_modidx", "__main__")}
    pages = {str(p.relative_to(site).with_suffix("")) for p in site.rglob("*.html")}
    assert modules <= pages, sorted(modules - pages)
    assert {"index", "tutorials/first_sharded_finetune", "recipe_fields", "changelog"} <= pages


def test_every_recipe_field_is_documented(site):
    from shardnb import Recipe
    text = (site / "recipe_fields.html").read_text()
    assert not [f for f in Recipe.model_fields if f">{f}<" not in text and f"{f}</" not in text]


def test_pages_in_a_browser(site, browser):
    "Opened as files, with the network refused: no request leaves, no error on the console, in light and in dark"
    ARTIFACTS.mkdir(exist_ok=True)
    context = browser.new_context(viewport=dict(width=1280, height=900), color_scheme="light")
    page, errors, left = context.new_page(), [], []
    page.on("console", lambda m: errors.append(f"{page.url}: {m.text}") if m.type == "error" else None)
    page.on("pageerror", lambda e: errors.append(f"{page.url}: {e}"))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else left.append(r.url))
    for f in sorted(site.rglob("*.html")):
        page.goto(f.as_uri(), wait_until="load")
        if f.stem in ("index", "first_sharded_finetune", "memory", "recipe_fields"):
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                page.screenshot(path=ARTIFACTS / f"docs-{f.stem}-{scheme}.png")
            page.emulate_media(color_scheme="light")
    context.close()
    assert not left and not errors, (left[:5], errors[:5])
