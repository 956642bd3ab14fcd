"""Pick a sharding strategy in a notebook cell, train on every rank, and watch where every byte of memory is."""
import importlib

__version__ = "0.1.0"

# Names resolve on first use, so that `import shardnb` and `%load_ext shardnb` stay light: no torch, no pandas, no matplotlib.
_HOMES = {
    "Recipe": "plan.recipe", "Strategy": "plan.strategy", "Machine": "plan.machine", "MemoryBreakdown": "plan.memory",
    "ShardnbError": "plan.problem", "RecipeError": "plan.problem", "PlanError": "plan.problem", "RunFailed": "plan.problem",
    "train": "run.start", "attach": "run.registry", "runs": "run.registry", "Run": "run.handle", "RunDir": "run.rundir",
    "library": "plan.library", "predict": "run.forecast", "compare": "run.compare", "Comparison": "run.compare", "Plan": "plan.advise", "pick": "ui.picker", "MemoryExplorer": "ui.explorer", "load_ipython_extension": "ui.magics", "unload_ipython_extension": "ui.magics",
}
__all__ = sorted(["plan", *(n for n in _HOMES if not n.endswith("_ipython_extension"))])


def __getattr__(name):
    if name == "plan": return importlib.import_module(f"{__name__}.plan")  # the package is the function too
    if name not in _HOMES: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


# What a lower floor offers and a higher one does. Imports go down only (tests/test_floors.py), so the lower one asks here.
UPSTAIRS = {
    "Recipe.preview": "run.preview:previewed", "plan.__call__": "run.forecast:plan", "Run.panel": "ui.panel:Panel", "Run.figure": "ui.charts:run_figure",
    "RunFailed._render_traceback_": "ui.magics:show_failure", "Plan.figure": "ui.figures:plan_figure", "Plan._repr_html_": "ui.planned:plan_html", "MemoryBreakdown.figure": "ui.figures:breakdown_figure",
    "Comparison.figure": "ui.compared:compare_figure", "Comparison._repr_html_": "ui.compared:compared_html",
}


def upstairs(method):
    "What does the work of a method whose class is on a lower floor"
    home, name = UPSTAIRS[method].split(":")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__(): return sorted({*globals(), *_HOMES})
