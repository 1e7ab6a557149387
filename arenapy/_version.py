"""The one place that states the version: the build reads it here, and so does the package."""

__version__ = "0.1.0"
