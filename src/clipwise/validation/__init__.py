"""What a run verifies around its steps: the state of the model, and how the loop uses the optimizer. Internal."""
