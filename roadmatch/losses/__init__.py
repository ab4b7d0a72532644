"""Embeddings and labels -> a loss: rankings by average precision and what is used beside them."""
