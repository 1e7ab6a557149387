"""A running median, written in Cython with scratch memory from an arena."""

from running_median.median import running_median

__all__ = ["running_median"]
