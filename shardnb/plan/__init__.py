"""What a run is and what it will need. The package is also the function `shardnb.plan(recipe, machine)`: a plan of every strategy side by side."""
import sys
from types import ModuleType


class _Callable(ModuleType):
    def __call__(self, recipe, machine=None):
        "Work out what fits, why, and which strategy to take (`shardnb.run.forecast.plan`)."
        from shardnb import upstairs
        return upstairs("plan.__call__")(recipe, machine)


sys.modules[__name__].__class__ = _Callable
