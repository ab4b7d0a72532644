"""Offline: labelled images go in, a model bundle comes out."""
