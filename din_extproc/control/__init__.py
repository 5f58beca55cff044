"""What Envoy must know: from the topology to Envoy's own configuration."""
