"The pages that no notebook holds: recipe fields, options of magics and commands, every public name, the changelog, and the table of contents below the index."
import ast
import inspect
import json
import re
from importlib import import_module
from pathlib import Path


def cell(text): return str(text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def table(head, rows): return ["| " + " | ".join(head) + " |", "| " + " | ".join(":---" for _ in head) + " |", *("| " + " | ".join(map(cell, r)) + " |" for r in rows), ""]


def recipe_fields():
    "Every field of a recipe, from the model that magics, command line, YAML and picker are made from"
    from shardnb.plan.recipe import GROUPS, recipe_table
    groups = {g: [] for g in GROUPS}
    for name, kind, default, group, meaning in recipe_table(): groups[group].append((f"`{name}`", kind, f"`{default}`" if default not in ("", "worked out") else "", meaning))
    lines = ["# Recipe fields", "", "One model describes a run. The same field is a keyword of `Recipe`, a key in YAML, [an option](options.md) of `%%shardtrain` and of `shardnb train`, "
             "and some are a control of the picker. Where no default stands, it is worked out from the model and the machine, or nothing is needed.", ""]
    for group, rows in groups.items(): lines += [f"## {group.capitalize()}", "", f"{GROUPS[group]}.", "", *table(("field", "type", "default", "meaning"), rows)]
    return "\n".join(lines)


def _value(a): return "" if a.nargs == 0 else f" {a.metavar or a.dest.upper()}"


def own_options(parser):
    "Rows of what a parser takes besides the fields of a recipe"
    from shardnb.plan.recipe import Recipe
    rows = []
    for a in parser._actions:
        if a.dest in Recipe.model_fields or a.dest == "help": continue
        name = ", ".join(a.option_strings) if a.option_strings else (a.metavar or a.dest)
        default = f" (default: {a.default})" if a.option_strings and a.nargs != 0 and a.default not in (None, "==SUPPRESS==") and "default" not in (a.help or "") else ""
        rows.append((f"`{name}{_value(a) if a.option_strings else ''}`", (a.help or "").replace("%%", "%") + default))
    return rows


def takes_recipe(parser):
    from shardnb.plan.recipe import Recipe
    return {a.dest for a in parser._actions} >= set(Recipe.model_fields)


def magics():
    "(its forms, parser) of each magic"
    from shardnb.ui.magics import _ABOUT, ShardMagics, _parser
    for name in sorted({n for names in ShardMagics.magics.values() for n in names}, key=[*_ABOUT].index):
        yield [mark + name for mark, kind in (("%%", "cell"), ("%", "line")) if name in ShardMagics.magics[kind]], _parser("%" + name)


def options():
    "What each magic and each command takes, from the parsers that read them"
    from shardnb.plan.recipe import GROUPS, options_of
    from shardnb.ui.cli import COMMANDS, command_parser
    lines = ["# Options of magics and commands", "", "`%load_ext shardnb` brings the magics; the command `shardnb` does the same at a terminal. Where it says *a recipe*, a YAML file may come first, and "
             "[every field of a recipe](#options-of-a-recipe) is an option; the Tab key completes them. Each answers to `--help`.", "", "## Magics", ""]
    for both, parser in magics():
        lines += [f"### {both[0].lstrip('%')}", "", " and ".join(f"`{b}`" for b in both) + ". " + inspect.cleandoc(parser.description).replace("\n", " "), ""]
        lines += table(("option", "meaning"), own_options(parser) + ([("*a recipe*", "every field, see below")] if takes_recipe(parser) else []))
    lines += ["## Commands", ""]
    for name in COMMANDS:
        parser = command_parser(name)
        rows = own_options(parser)
        if takes_recipe(parser): rows.append(("*a recipe*", "every field, see below"))
        lines += [f"### shardnb {name}", "", COMMANDS[name].__doc__ + ".", "", *(table(("option", "meaning"), rows) if rows else []), *([parser.epilog.replace("\n", "  \n"), ""] if parser.epilog else [])]
    lines += ["## Options of a recipe", "", "An option is a field with hyphens. Lists take commas (`--lora-target-modules q_proj,v_proj`), mappings take JSON or `name=value`, and a switch that is on is turned off by its form with `no-`.", ""]
    groups = {g: [] for g in GROUPS}
    for o in options_of():
        flag = o.flags[0] + (f" / --no-{o.flags[0][2:]}" if o.kind == "bool" else "")
        groups[o.group].append((f"`{flag}`", " \\| ".join(o.choices) or o.kind, o.meaning))
    for group, rows in groups.items(): lines += [f"### {GROUPS[group]}", "", *table(("option", "takes", "meaning"), rows)]
    return "\n".join(lines)


def public_names(path):
    "[(name, its definition or None for a constant)] of a module's `__all__`, without importing it"
    body = ast.parse(path.read_text()).body
    told = next((ast.literal_eval(s.value) for s in body if isinstance(s, ast.Assign) and getattr(s.targets[0], "id", "") == "__all__" and isinstance(s.value, ast.List)), [])
    made = {s.name: s for s in body if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    return [(n, made.get(n)) for n in told]


def comment(name, source):
    "What stands beside a constant"
    return (re.search(rf"^{name}\b[^\n=]*=.*?[\]\[(){{}}\w\"'] +# *([^\n]+)$", source, re.M) or ["", ""])[1]


def value(name, source):
    "A constant's assignment, as far as its first line goes"
    line = (re.search(rf"^(?:.*, *)?{name}\b[^\n]*=[^\n]*", source, re.M) or [""])[0].split("  #")[0].split(" # ")[0].strip().replace("`", "'")
    return f"`{line if len(line) <= 100 else line[:100] + ' …'}`" if line else ""


def modules(root):
    "Modules that notebooks export, floor by floor"
    return [p for floor in ("plan", "run", "ui") for p in sorted((Path(root) / "shardnb" / floor).glob("*.py")) if public_names(p)]


def reference(root):
    "Every public name of every module, with its line of documentation and a link to it"
    lines = ["# Every public name", "", "What a module offers, in one line each. The names that most people need are `shardnb`'s own:", ""]
    shardnb = import_module("shardnb")
    homes = {n: home for n, home in shardnb._HOMES.items() if not n.endswith("_ipython_extension")}
    lines += [" · ".join(f'<a href="{home.replace(".", "/")}.html#{n.lower()}"><code>shardnb.{n}</code></a>' for n, home in [*homes.items(), ("plan", "run.forecast")]), ""]
    for p in modules(root):
        page, tree = f"{p.parent.name}/{p.stem}", ast.parse(p.read_text())
        rows = []
        for name, made in public_names(p):
            kind = "constant" if made is None else "class" if isinstance(made, ast.ClassDef) else "function"
            text = p.read_text()
            said = (ast.get_docstring(made) or "").split("\n")[0] if made else "; ".join(filter(None, (value(name, text), comment(name, text))))
            rows.append((f'<a href="{page}.html{f"#{name.lower()}" if made else ""}"><code>{name}</code></a>', kind, cell(said)))
        lines += [f"## {p.parent.name}.{p.stem}", "", cell((ast.get_docstring(tree) or "").split("\n")[0].rstrip(".") + "."), ""]
        lines += ["| name | kind | what it is |", "| :--- | :--- | :--- |", *("| " + " | ".join(r) + " |" for r in rows), ""]
    return "\n".join(lines)


def contents(sections):
    "Hidden tables of contents: Sphinx's sidebar shows them in this order"
    blocks = []
    for caption, pages in sections: blocks.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]))
    return "\n\n".join(blocks)


def write(root, project, src, sections):
    "root: of the repository; project: the copy whose notebooks became pages in src"
    (src / "recipe_fields.md").write_text(recipe_fields())
    (src / "options.md").write_text(options())
    (src / "reference.md").write_text(reference(project))
    (src / "changelog.md").write_text((Path(root) / "CHANGELOG.md").read_text())
    (src / "license.md").write_text("# License\n\n```text\n" + (Path(root) / "LICENSE").read_text() + "```\n")
    guides = [s for s in sections if "/" in s[1][0] and s[1][0].split("/")[0] in ("tutorials", "explanations")]
    sections = [*guides, ("Reference", ["recipe_fields", "options", "reference"]), *(s for s in sections if s not in guides), ("More", ["changelog", "license"])]
    index = src / "index.ipynb"
    nb = json.loads(index.read_text())
    nb["cells"].append(dict(cell_type="markdown", metadata={}, id="toctree", source=contents(sections)))
    index.write_text(json.dumps(nb, indent=1))
