"""A folder for PYTHONPATH: what Python imports before a program under ``arenapy run``."""
