"""Commands that write configuration: rendered proxies, monitoring files, keys."""
