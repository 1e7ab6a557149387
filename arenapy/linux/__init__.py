"""Every system call: mappings, their pages, reserved address space, limits, output files."""
