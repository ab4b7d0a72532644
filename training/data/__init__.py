"""Labelled images: where they lie, what is wrong with them, which split and batch they are in, how they are read."""
