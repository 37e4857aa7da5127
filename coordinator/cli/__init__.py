"""The `hearth` command: subcommands, their options, and text and JSON output."""
