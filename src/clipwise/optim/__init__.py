"""What happens after the noise: averages of the parameters, and penalties."""
