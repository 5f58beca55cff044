"""Request handlers and the decision pipeline: `pipeline.py` has the one order of the steps of a decision."""
