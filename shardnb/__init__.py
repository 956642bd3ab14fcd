"""Pick a sharding strategy in a notebook cell, train on every rank, and watch where every byte of memory is."""
import importlib

__version__ = "0.1.0"

# Names resolve on first use, so that `import shardnb` and `%load_ext shardnb` stay light: no torch, no pandas, no matplotlib.
_HOMES = {
    "Recipe": "plan.recipe", "Strategy": "plan.strategy", "Machine": "plan.machine", "MemoryBreakdown": "plan.memory",
    "ShardnbError": "plan.problem", "RecipeError": "plan.problem", "PlanError": "plan.problem", "RunFailed": "plan.problem",
    "train": "run.handle", "attach": "run.handle", "runs": "run.handle", "Run": "run.handle", "RunDir": "run.rundir",
    "pick": "ui.picker", "load_ipython_extension": "ui.magics", "unload_ipython_extension": "ui.magics",
}
__all__ = sorted(n for n in _HOMES if not n.endswith("_ipython_extension"))


def __getattr__(name):
    if name not in _HOMES: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__(): return sorted({*globals(), *_HOMES})
