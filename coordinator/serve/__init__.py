"""Keep models deployed and answer requests to them."""
