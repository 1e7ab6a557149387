"""The command ``arenapy``: one module or folder for each subcommand."""
