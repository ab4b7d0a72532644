"""The service: a query goes in, an answer comes out."""
