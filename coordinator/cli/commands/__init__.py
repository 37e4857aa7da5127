"""One file for each command of `hearth`."""
