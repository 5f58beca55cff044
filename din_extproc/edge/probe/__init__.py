"""Queries to others: nodes' metrics, one token, Envoy's admin port, a gateway from outside."""
