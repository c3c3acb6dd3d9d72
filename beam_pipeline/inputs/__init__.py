"""From an input to references of its images."""
