"""Held-out searches -> operating points with their evidence."""

from roadmatch.calibration.fit import Calibration, calibrate, choose_score
from roadmatch.calibration.searches import Searches

__all__ = ["Calibration", "Searches", "calibrate", "choose_score"]
