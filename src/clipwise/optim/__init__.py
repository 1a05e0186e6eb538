"""Post-processing of releases: averages of the parameters, and penalties."""
