"""Pretrained weights to a network that can be trained, and a network to the graph that serving runs."""
