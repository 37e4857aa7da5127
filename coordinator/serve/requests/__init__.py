"""The way of a request to a deployment: admission, retries, probes."""
