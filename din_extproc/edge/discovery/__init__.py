"""Sources that find nodes where they already are."""
