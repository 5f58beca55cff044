"""The gRPC ports: two transports, and the services that either carries."""
