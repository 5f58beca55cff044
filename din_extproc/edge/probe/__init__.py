"""What is asked of others: nodes' metrics, one token, Envoy's admin port, a gateway from outside."""
