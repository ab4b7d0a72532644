"""Metrics of ranked lists and of one threshold that all queries share, in numpy alone."""
