"""Immutable value objects that the packages exchange. They have no behaviour beyond reading and validating their own fields."""
