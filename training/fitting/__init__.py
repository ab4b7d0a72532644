"""From a recipe to a trained network: steps and epochs, what they leave in a run's folder, and what they say."""
