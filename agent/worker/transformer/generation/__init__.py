"""Token generation: step orders, batching, sampling."""
