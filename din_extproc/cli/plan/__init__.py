"""Commands that say what a deployment does or would do: `explain`, `replay`, `simulate`, `verify`, `bench ...`."""
