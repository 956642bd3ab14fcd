"""Builds the docs site without Quarto: `make docs`, or `python docs/build.py --reuse` for a quick look.

copy of the project -> every notebook executed -> nbdev's own processing (show_doc, links) -> plain notebooks for MyST-NB -> Sphinx.
With --reuse the outputs stored in the notebooks are taken as they are; without it each notebook runs, or comes from a cache if neither it, the package nor an installed library changed.
Only the first build needs a network: it fetches three files of JavaScript through npm, which are kept.
"""
import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

import nbformat
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SITE = ROOT / "_docs"
WORK = ROOT / "build" / "docs"
CACHE = Path(sys.prefix) / "docs_cache"
# Three files of JavaScript that the pages bring along, from the npm registry: maths, and widgets that were saved with their state.
NPM = {"requirejs@2.3.8": {"package/require.js": "require.js"}, "@jupyter-widgets/html-manager@1.0.14": {"package/dist/embed-amd.js": "embed-amd.js"},
       "mathjax@3.2.2": {"package/es5/tex-svg.js": "tex-svg.js"}}


def javascript(static):
    "Put the JavaScript files into `static`, from the cache or through `npm pack`"
    store = CACHE / "npm"
    for package, files in NPM.items():
        if not all((store / f).exists() for f in files.values()):
            npm = shutil.which("npm") or sys.exit("docs need npm to fetch three JavaScript files (Debian: apt-get install npm)")
            tmp = store / "tmp"
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir(parents=True)
            subprocess.run([npm, "pack", "--silent", package], cwd=tmp, check=True, stdout=subprocess.DEVNULL)
            subprocess.run(["tar", "xzf", next(tmp.glob("*.tgz")).name, *files], cwd=tmp, check=True)
            for inside, name in files.items(): shutil.move(tmp / inside, store / name)
            shutil.rmtree(tmp)
        for name in files.values(): shutil.copy2(store / name, static / name)


def copy_project(dest):
    "The parts of the project that nbdev reads, so that a build never writes into nbs/ or shardnb/"
    skip = shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__", ".shardnb", "sidebar.yml")
    for d in ("nbs", "shardnb"): shutil.copytree(ROOT / d, dest / d, ignore=skip)
    for f in ("settings.ini", "pyproject.toml", "README.md"): shutil.copy2(ROOT / f, dest / f)


def skipped(source): return any(flag in source for flag in ("#| eval: false", "#| gpu", "#| slow"))   # nbdev's own flags for cells that tests leave out


def surroundings(root):
    "A digest of all that a notebook's outputs depend on beside its own code: the package with its recipes, the examples that notebooks share, and what is installed"
    files = [p for d in ("shardnb", "nbs") for p in sorted((root / d).rglob("*")) if p.suffix in (".py", ".yaml") and not {"__pycache__", ".ipynb_checkpoints", ".shardnb"} & set(p.parts)]
    installed = sorted({f"{d.name}=={d.version}" for d in distributions()})
    digest = hashlib.sha256("\n".join([sys.version, *installed]).encode())
    for p in files: digest.update(f"{p.relative_to(root)}\0".encode() + p.read_bytes())
    return digest.hexdigest()


def execute(nb_file, project, around):
    "Run one notebook where it lies, as a person would; what was run before with the same code and `surroundings` comes from the cache"
    from nbclient import NotebookClient
    nb = nbformat.read(nb_file, 4)
    code = [c.source for c in nb.cells if c.cell_type == "code"]
    kept = CACHE / "run" / (hashlib.sha256(json.dumps([around, str(nb_file.relative_to(project)), code]).encode()).hexdigest()[:24] + ".json")
    if kept.exists():
        outputs, widgets = json.loads(kept.read_text())
        for c, o in zip([c for c in nb.cells if c.cell_type == "code"], outputs, strict=True): c.outputs = [nbformat.from_dict(x) for x in o]
        if widgets: nb.metadata["widgets"] = widgets
        nbformat.write(nb, nb_file)
        return 0.0
    t = time.monotonic()
    sources = [c.source for c in nb.cells]
    for c in nb.cells:
        if c.cell_type != "code": continue
        if skipped(c.source): c.metadata["tags"] = ["skip-execution"]
        elif "#| export" in c.source: c.source = without_program(c.source, statements(c.source))   # in a kernel, __name__ is "__main__"
    NotebookClient(nb, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(nb_file.parent)}}, skip_cells_with_tag="skip-execution").execute()
    for c, source in zip(nb.cells, sources, strict=True):
        c.source = source
        for k in ("tags", "execution"): c.metadata.pop(k, None)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps([[c.outputs for c in nb.cells if c.cell_type == "code"], nb.metadata.get("widgets")]))
    nbformat.write(nb, nb_file)
    return time.monotonic() - t


def execute_all(project, env):
    "Every notebook, one after another: they start ranks, and the cores are few"
    os.environ.update(env)
    around = surroundings(project)
    for f in notebooks(project):
        os.environ["SHARDNB_HOME"] = str(project.parent / "runs" / f.stem)
        seconds = execute(f, project, around)
        print(f"  {f.relative_to(project)}: {f'{seconds:.0f} s' if seconds else 'unchanged, from the cache'}", flush=True)


def statements(source):
    "Top-level statements of a cell, magics aside"
    if source.lstrip().startswith("%%"): return []
    try: return ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.M)).body
    except SyntaxError: return []


def constants_only(body):
    "Does a cell assign public names and define nothing that show_doc would show?"
    names = [t.id for s in body if isinstance(s, (ast.Assign, ast.AnnAssign)) for t in getattr(s, "targets", [getattr(s, "target", None)]) if isinstance(t, ast.Name)]
    return any(not n.startswith("_") for n in names) and not any(isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) for s in body)


def without_program(source, body):
    "The cell without its `if __name__ == '__main__'` blocks"
    lines = source.splitlines()
    for s in reversed(body):
        if isinstance(s, ast.If) and "__name__" in ast.unparse(s.test): del lines[s.lineno - 1:s.end_lineno]
    return "\n".join(lines)


def mixed(body):
    "Does a cell import and do something else too?"
    return any(isinstance(s, (ast.Import, ast.ImportFrom)) for s in body) and not all(isinstance(s, (ast.Import, ast.ImportFrom)) for s in body)


def prepare(nb_file):
    """Four things that nbdev's docs processing would do otherwise, put right in the copy.

    It hides what is exported and shows signatures in its place; a table of constants has none, so its source is shown.
    It runs every cell that holds an import, without the cells before it; one that does something else too would fail or run twice, and it has its output already.
    And it runs all that is exported: what a module does as a program is not for a page.
    A `show_doc` in a hidden cell counts for it as shown, and it isn't: such cells go.
    """
    nb = nbformat.read(nb_file, 4)
    nb.cells = [c for c in nb.cells if not re.fullmatch(r"#\| *hide\s+show_doc\(\w+\);?\s*", c.source)]
    for c in nb.cells:
        if c.cell_type != "code": continue
        body, exported = statements(c.source), re.search(r"^#\| *export", c.source, flags=re.M)
        if exported and constants_only(body): c.source = re.sub(r"^#\| *export *$", "#| exports", c.source, flags=re.M)
        if exported: c.source = without_program(c.source, body)
        if not exported and mixed(body) and "#| eval: false" not in c.source: c.source = "#| eval: false\n" + c.source
    nbformat.write(nb, nb_file)


def notebooks(project): return sorted(p for p in (project / "nbs").rglob("*.ipynb") if not p.name.startswith("_"))


def toctree(project):
    "Sections and pages in the order of nbs/_quarto.yml, so that Quarto and Sphinx show one sidebar"
    from to_myst import page_name
    site = yaml.safe_load((project / "nbs" / "_quarto.yml").read_text())["website"]["sidebar"]["contents"]
    sections = []
    for entry in site:
        if isinstance(entry, str): continue   # the index itself
        found = sorted((project / "nbs").glob(entry["contents"]))
        pages = [str(page_name(p.relative_to(project / "nbs")).with_suffix("")) for p in found if p.suffix == ".ipynb"]
        if pages: sections.append((entry["section"], pages))
    return sections


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--reuse", action="store_true", help="take the outputs that are stored in the notebooks")
    ap.add_argument("--site", type=Path, default=SITE, help="where the pages go")
    ap.add_argument("--work", type=Path, default=WORK, help="where it is made; emptied first")
    a = ap.parse_args()
    t0 = time.monotonic()
    shutil.rmtree(a.work, ignore_errors=True)
    project, src = a.work / "project", a.work / "src"
    project.mkdir(parents=True)
    copy_project(project)
    shared = project / "nbs" / "plan"  # its notebooks have a file of examples in common
    env = {"PYTHONPATH": os.pathsep.join(map(str, (project, shared))), "JUPYTER_PREFER_ENV_PATH": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.path.insert(0, str(DOCS))
    if not a.reuse: execute_all(project, env)
    for f in notebooks(project): prepare(f)
    subprocess.run([sys.executable, str(DOCS / "proc_nbs.py")], cwd=project, env={**os.environ, **env}, check=True)
    import pages
    import to_myst
    to_myst.convert(project / "_proc", src)
    shutil.copytree(project / "nbs" / "images", src / "images", dirs_exist_ok=True)
    pages.write(ROOT, project, src, toctree(project))
    shutil.copy2(DOCS / "conf.py", src / "conf.py")
    shutil.copytree(DOCS / "_static", src / "_static")
    javascript(src / "_static")
    html = a.work / "html"   # MyST-NB leaves a folder beside its output, so that isn't made in its final place
    code = subprocess.run([sys.executable, "-m", "sphinx", "-j", "auto", "-W", "--keep-going", "-q", "-b", "html", src, html]).returncode
    if code: sys.exit(f"sphinx found problems (exit {code})")
    shutil.rmtree(a.site, ignore_errors=True)
    shutil.copytree(html, a.site, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo*"))
    import check
    problems = check.problems(a.site)
    for p in problems: print(p, file=sys.stderr)
    if problems: sys.exit(f"{len(problems)} broken or outward links")
    print(f"{len(list(a.site.rglob('*.html')))} pages in {a.site}, no broken link, {time.monotonic() - t0:.0f} s; open {a.site / 'index.html'}")


if __name__ == "__main__": main()
