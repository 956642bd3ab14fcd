"A case of a parametrized test that only the long counts run."
import pytest


def slow(*values): return pytest.param(*values, marks=pytest.mark.slow)
