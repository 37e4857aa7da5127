"""The coordinator: finds devices, reads models, plans, deploys and serves; and the `hearth` command."""
