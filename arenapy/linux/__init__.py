"""The system: mappings, pages, reserved address space, what malloc keeps, limits, output files."""
