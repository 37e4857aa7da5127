"""The `hearth` command: subcommands, their options, and output for people and programs."""
