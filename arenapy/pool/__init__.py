"""Pool: any size, through caches of threads over a heap of pages."""
