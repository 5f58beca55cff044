"""The modelled engine as a server (see `sim`)."""
