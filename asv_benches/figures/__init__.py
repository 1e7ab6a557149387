"""The results files, the pages that Sphinx makes of them, and README.md's table and chart."""
