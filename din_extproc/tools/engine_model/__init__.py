"""A modelled inference engine that answers as vLLM does. Pure: time is an argument, so it runs in real and in virtual time."""
