"""Where candidates come from: rows that may be the best ones for a query."""
