"""`rollout`: samplers and scorers."""
