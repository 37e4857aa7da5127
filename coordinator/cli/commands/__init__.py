"""The subcommands of `hearth`, one file each."""
