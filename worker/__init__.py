"""Gallery images -> gallery: the program that works on jobs."""
