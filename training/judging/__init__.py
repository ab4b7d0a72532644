"""What a run is worth on classes that it has not seen: figures, operating points, bundle and report."""
