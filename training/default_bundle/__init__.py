"""The bundle that comes with Roadmatch: its photographs, their edited copies, and the fit on them."""
