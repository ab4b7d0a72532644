"""Image matching with one calibrated threshold: bundles, embedding, calibration, galleries."""
