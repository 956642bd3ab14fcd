"The pages that no notebook holds: the table of recipe fields, the changelog, and the table of contents below the index."
import json
from pathlib import Path


def cell(text): return str(text).replace("|", "\\|").replace("\n", " ")


def recipe_fields():
    "Every field of a recipe, from the model that magics, command line, YAML and picker are made from"
    from shardnb.plan.recipe import recipe_table
    groups = {}
    for name, kind, default, group, meaning in recipe_table(): groups.setdefault(group, []).append((f"`{name}`", kind, f"`{default}`" if default != "worked out" else "", meaning))
    lines = ["# Recipe fields", "", "One model describes a run. The same field is a keyword of `Recipe`, a key in YAML, an option of `%%shardtrain` and of `shardnb train`, "
             "and some are a control of the picker. Where no default stands, it is worked out from the model and the machine, or nothing is needed.", ""]
    for group, rows in groups.items():
        lines += [f"## {group.capitalize()}", "", "| field | type | default | meaning |", "| --- | --- | --- | --- |", *("| " + " | ".join(map(cell, r)) + " |" for r in rows), ""]
    return "\n".join(lines)


def contents(sections):
    "Hidden tables of contents: Sphinx's sidebar shows them in this order"
    blocks = []
    for caption, pages in sections: blocks.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]))
    return "\n\n".join(blocks)


def write(root, src, sections):
    (src / "recipe_fields.md").write_text(recipe_fields())
    (src / "changelog.md").write_text((Path(root) / "CHANGELOG.md").read_text())
    (src / "license.md").write_text("# License\n\n```text\n" + (Path(root) / "LICENSE").read_text() + "```\n")
    sections = [*sections, ("More", ["recipe_fields", "changelog", "license"])]
    index = src / "index.ipynb"
    nb = json.loads(index.read_text())
    nb["cells"].append(dict(cell_type="markdown", metadata={}, id="toctree", source=contents(sections)))
    index.write_text(json.dumps(nb, indent=1))
