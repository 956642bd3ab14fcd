"nbdev's processing of notebooks for docs (show_doc, front matter, links), as nbdev-docs does it before it calls Quarto. Runs in the project's folder."
import builtins
import importlib
import inspect
import pkgutil
import warnings
from pathlib import Path

import matplotlib.figure
import nbdev.doclinks
import pandas
import shardnb
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs

# Annotations such as "pandas.DataFrame" or "Panel" are strings where a module imports the thing only when it is used; show_doc evaluates them.
# The workers are spawned, read this file again, and so know the names too.
builtins.pandas, builtins.matplotlib = pandas, matplotlib
builtins.__file__ = str(Path(shardnb.__file__).parent / "plan" / "notebook.py")   # what is exported may ask where it lies; a notebook's cell has no such name
for found in pkgutil.walk_packages(shardnb.__path__, "shardnb."):
    if found.name.endswith("_modidx"): continue
    module = importlib.import_module(found.name)
    for name, thing in vars(module).items():
        if inspect.isclass(thing) and thing.__module__ == found.name and not hasattr(builtins, name): setattr(builtins, name, thing)
warnings.filterwarnings("ignore", message="Found cells containing imports and other code")   # docs/build.py has dealt with them

if __name__ == "__main__":
    refresh_quarto_yml()
    nbdev.doclinks._build_modidx()
    proc_nbs(n_workers=2, force=True)
