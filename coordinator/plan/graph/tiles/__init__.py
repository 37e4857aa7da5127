"""The choice of tiles: into how many pieces each operator of a graph is cut, and along which axes."""
