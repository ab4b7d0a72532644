"""Speed, memory and quality as ratios: `python -m benchmarks.NAME` prints one JSON object and nothing else."""
