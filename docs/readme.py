"""Writes README.md from nbs/index.ipynb: hidden cells and directives out, stored outputs in, links made to work from the project's folder.

`python docs/readme.py --check` changes nothing and fails when README.md is not what the notebook says.
"""
import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Written by `make readme` from nbs/index.ipynb: edit that. -->\n\n"


def prepared(nb):
    "The notebook as a reader should see it"
    cells = []
    for c in nb.cells:
        flags = set(re.findall(r"^#\| *(.+?) *$", c.source, flags=re.M)) if c.cell_type == "code" else set()
        if c.cell_type == "raw" or "hide" in flags: continue
        if c.cell_type == "code":
            c.source = re.sub(r"^#\|.*\n?", "", c.source, flags=re.M)
            if "echo: false" in flags: c.metadata["readme_input"] = False
            c.outputs = [readable(o) for o in c.outputs if o.get("name") != "stderr"]
        cells.append(c)
    nb.cells = cells
    return nb


def readable(o):
    "Markdown before plain text before anything that a text file can't show"
    data = o.get("data")
    if data is None: return o
    o["data"] = {k: data[k] for k in ("text/markdown", "text/plain") if k in data}
    if "text/markdown" in o["data"]: o["data"].pop("text/plain", None)
    return o


def without_input(nb):
    "Cells with `#| echo: false` become their Markdown output alone"
    for c in nb.cells:
        if c.metadata.get("readme_input", True): continue
        text = "\n\n".join(o["data"]["text/markdown"] for o in c.outputs if "text/markdown" in o.get("data", {}))
        c.update(nbformat.v4.new_markdown_cell(text))
        c.pop("outputs", None)
        c.pop("execution_count", None)
    return nb


def readme():
    "The text of README.md"
    nb = without_input(prepared(nbformat.read(ROOT / "nbs" / "index.ipynb", 4)))
    nb.metadata["language_info"] = {"name": "python"}   # colours the code
    text, _ = MarkdownExporter().from_notebook_node(nb)
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:)", r"\1nbs/", text)                  # pictures
    text = re.sub(r"(?<!!)(\[[^\]]*\]\()(?!\w+:|#)([^)]+\.ipynb)", r"\1nbs/\2", text)   # notebooks
    text = re.sub(r"(?<!!)(\[[^\]]*\]\()\.\./", r"\1", text)                    # files beside README
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return NOTE + re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


if __name__ == "__main__":
    target, text = ROOT / "README.md", readme()
    if "--check" in sys.argv: sys.exit(0 if target.read_text() == text else "README.md is not what nbs/index.ipynb says: make readme")
    target.write_text(text)
    print(f"wrote {target.name}, {len(text.splitlines())} lines")
